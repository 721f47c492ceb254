/* Device memory through the driver's virtual-memory interface, with a file descriptor for each
 * region, so that another process can hold or map it (ARCHITECTURE.md, memory outlives the
 * process). Also finds the driver at run time. Any thread after kn_cuda_start. */
#include "kernels/cuda/module.h"

#include <pthread.h>
#include <unistd.h>

static pthread_once_t once = PTHREAD_ONCE_INIT;
static struct kn_cuda_driver driver; /* written once, like all here */
static struct bt_err start_err;
static int start_rc;

int kn_cuda_fail(struct bt_err *err, const char *what, int cuda_error)
{
    return BT_FAIL(err, BT_E_DEVICE_LOST, "%s: %s", what,
                   cuda_error >= 1000 ? "the matrix library refused it"
                                      : cudaGetErrorString((cudaError_t)cuda_error));
}

static bool find_driver(void)
{
    static const struct {
        const char *name;
        size_t at;
    } want[] = {
        {"cuMemCreate", offsetof(struct kn_cuda_driver, mem_create)},
        {"cuMemRelease", offsetof(struct kn_cuda_driver, mem_release)},
        {"cuMemAddressReserve", offsetof(struct kn_cuda_driver, mem_reserve)},
        {"cuMemAddressFree", offsetof(struct kn_cuda_driver, mem_address_free)},
        {"cuMemMap", offsetof(struct kn_cuda_driver, mem_map)},
        {"cuMemUnmap", offsetof(struct kn_cuda_driver, mem_unmap)},
        {"cuMemSetAccess", offsetof(struct kn_cuda_driver, mem_set_access)},
        {"cuMemExportToShareableHandle", offsetof(struct kn_cuda_driver, mem_export)},
        {"cuMemImportFromShareableHandle", offsetof(struct kn_cuda_driver, mem_import)},
        {"cuMemGetAllocationGranularity", offsetof(struct kn_cuda_driver, mem_granularity)},
    };

    for (size_t i = 0; i < BT_ARRAY_LEN(want); i++) {
        enum cudaDriverEntryPointQueryResult found;
        void *f = NULL;

        if (cudaGetDriverEntryPointByVersion(want[i].name, &f, 12000, cudaEnableDefault, &found) !=
                cudaSuccess ||
            !f) {
            BT_FAIL(&start_err, BT_E_UNAVAILABLE, "the CUDA driver lacks %s", want[i].name);
            return false;
        }
        memcpy((char *)&driver + want[i].at, &f, sizeof(f));
    }
    return true;
}

static void start(void)
{
    int n = 0, major = 0, minor = 0;
    cudaError_t e = cudaGetDeviceCount(&n);

    start_rc = BT_E_UNAVAILABLE;
    if (e != cudaSuccess || n < 1) {
        BT_FAIL(&start_err, BT_E_UNAVAILABLE, "no CUDA device: %s",
                e != cudaSuccess ? cudaGetErrorString(e) : "the driver reports none");
        return;
    }
    e = cudaSetDevice(0);
    if (e == cudaSuccess) {
        e = cudaFree(NULL); /* makes the context */
    }
    if (e != cudaSuccess) {
        BT_FAIL(&start_err, BT_E_UNAVAILABLE, "CUDA device 0: %s", cudaGetErrorString(e));
        return;
    }
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0);
    if (major != 9 || minor != 0) {
        BT_FAIL(&start_err, BT_E_UNAVAILABLE,
                "CUDA device 0 has compute capability %d.%d, the kernels need 9.0 (Hopper)", major,
                minor);
        return;
    }
    if (find_driver()) {
        start_rc = BT_OK;
    }
}

int kn_cuda_start(const struct kn_cuda_driver **ret, struct bt_err *err)
{
    pthread_once(&once, start);
    if (start_rc < 0) {
        return BT_FAIL(err, start_rc, "%s", start_err.msg);
    }
    cudaSetDevice(0); /* of this thread */
    *ret = &driver;
    return BT_OK;
}

static CUmemAllocationProp prop(void)
{
    CUmemAllocationProp p = {
        .type = CU_MEM_ALLOCATION_TYPE_PINNED,
        .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
        .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0},
        .allocFlags = {.gpuDirectRDMACapable = 1},
    };

    return p;
}

/* Maps `h` for reading and writing. */
static CUresult map(CUmemGenericAllocationHandle h, size_t size, CUdeviceptr *ret)
{
    CUmemAccessDesc access = {.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0},
                              .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUdeviceptr p;
    CUresult r = driver.mem_reserve(&p, size, 0, 0, 0);

    if (r != CUDA_SUCCESS) {
        return r;
    }
    r = driver.mem_map(p, size, 0, h, 0);
    if (r == CUDA_SUCCESS) {
        r = driver.mem_set_access(p, size, &access, 1);
        if (r == CUDA_SUCCESS) {
            *ret = p;
            return r;
        }
        driver.mem_unmap(p, size);
    }
    driver.mem_address_free(p, size);
    return r;
}

static int cuda_alloc(size_t bytes, const char *name, struct bt_mem_region *ret, struct bt_err *err)
{
    const struct kn_cuda_driver *d;
    CUmemAllocationProp p = prop();
    CUmemGenericAllocationHandle h;
    CUdeviceptr at = 0;
    size_t step, size;
    int fd = -1, rc = kn_cuda_start(&d, err);
    CUresult r;

    if (rc < 0) {
        return rc;
    }
    r = d->mem_granularity(&step, &p, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
    if (r != CUDA_SUCCESS || bytes == 0 || !bt_add_size(bytes, step - 1, &size)) {
        return BT_FAIL(err, BT_E_INVALID, "device memory %s: cannot allocate %zu bytes", name,
                       bytes);
    }
    size -= size % step;
    r = d->mem_create(&h, size, &p, 0);
    if (r != CUDA_SUCCESS) { /* a card or driver without RDMA */
        p.allocFlags.gpuDirectRDMACapable = 0;
        r = d->mem_create(&h, size, &p, 0);
    }
    if (r != CUDA_SUCCESS) {
        return BT_FAIL(err, BT_E_NOMEM, "device memory %s: %zu bytes: error %d", name, size,
                       (int)r);
    }
    r = d->mem_export(&fd, h, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
    if (r == CUDA_SUCCESS) {
        r = map(h, size, &at);
    }
    d->mem_release(h); /* the mapping and the descriptor keep it */
    if (r != CUDA_SUCCESS) {
        if (fd >= 0) {
            close(fd);
        }
        return BT_FAIL(err, BT_E_NOMEM, "device memory %s: cannot map %zu bytes: error %d", name,
                       size, (int)r);
    }
    *ret = (struct bt_mem_region){&kn_cuda_mem, (void *)(uintptr_t)at, size, fd};
    return BT_OK;
}

static void cuda_free(struct bt_mem_region *r)
{
    if (r->base) {
        CUdeviceptr p = (CUdeviceptr)(uintptr_t)r->base;

        driver.mem_unmap(p, r->bytes);
        driver.mem_address_free(p, r->bytes);
        if (r->fd >= 0) {
            close(r->fd);
        }
    }
    *r = (struct bt_mem_region){.fd = -1};
}

static void cuda_copy(void *dst, const void *src, size_t bytes)
{
    cudaMemcpy(dst, src, bytes, cudaMemcpyDefault); /* a fault shows at the next pass */
}

/* The size is rounded up as alloc rounds it; what holds less cannot be mapped. */
static int
cuda_import(int fd, size_t bytes, const char *name, struct bt_mem_region *ret, struct bt_err *err)
{
    const struct kn_cuda_driver *d;
    CUmemAllocationProp p = prop();
    CUmemGenericAllocationHandle h;
    CUdeviceptr at = 0;
    size_t step, size;
    int rc = kn_cuda_start(&d, err);
    CUresult r;

    if (rc < 0) {
        return rc;
    }
    r = d->mem_granularity(&step, &p, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
    if (r != CUDA_SUCCESS || bytes == 0 || !bt_add_size(bytes, step - 1, &size)) {
        return BT_FAIL(err, BT_E_INVALID, "device memory %s: cannot import %zu bytes", name, bytes);
    }
    size -= size % step;
    r = d->mem_import(&h, (void *)(uintptr_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    if (r != CUDA_SUCCESS) {
        return BT_FAIL(err, BT_E_INVALID, "device memory %s: the descriptor is none: error %d",
                       name, (int)r);
    }
    r = map(h, size, &at);
    d->mem_release(h);
    if (r != CUDA_SUCCESS) {
        return BT_FAIL(err, BT_E_INVALID, "device memory %s: cannot map %zu bytes: error %d", name,
                       size, (int)r);
    }
    *ret = (struct bt_mem_region){&kn_cuda_mem, (void *)(uintptr_t)at, size, fd};
    return BT_OK;
}

static void cuda_protect(struct bt_mem_region *r)
{
    CUmemAccessDesc access = {.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0},
                              .flags = CU_MEM_ACCESS_FLAGS_PROT_READ};

    driver.mem_set_access((CUdeviceptr)(uintptr_t)r->base, r->bytes, &access, 1); /* a wish */
}

const struct bt_mem_ops kn_cuda_mem = {
    .kind = BT_MEM_CUDA,
    .name = "cuda",
    .alloc = cuda_alloc,
    .free = cuda_free,
    .copy = cuda_copy,
    .import = cuda_import,
    .protect = cuda_protect,
};
