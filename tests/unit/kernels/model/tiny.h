/* Tiny models made by tests/tools/mkmodel.py for one test run.
 *
 * Needs a Python with numpy: $BATON_TEST_PYTHON (tests/run.sh sets it), else python3. */
#ifndef BT_TESTS_KERNELS_MODEL_TINY_H
#define BT_TESTS_KERNELS_MODEL_TINY_H

#include "common/file/model.h"

/* True if models can be made here; otherwise says on stderr what is missing. */
bool tiny_available(void);
/* Makes and opens a model: `args` (NULL at the end) for mkmodel.py without --out; `dir`: a Hugging
 * Face directory instead of a GGUF file. Fails the test on any error. The files are removed at
 * once (the open model keeps its mappings). */
struct bt_model_file *tiny_open(const char *const *args, bool dir);

#endif
