/* A fault of the device, on purpose: a kernel writes where nothing is mapped. The context that this
 * process shares with everything else in it is lost from then on. */
#include <cuda_runtime.h>

namespace {

__global__ void write_nowhere(int *p)
{
    *p = 1;
}

} // namespace

extern "C" int rig_fault(void)
{
    write_nowhere<<<1, 1>>>((int *)0x10);
    return (int)cudaDeviceSynchronize();
}
