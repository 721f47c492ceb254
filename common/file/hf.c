/* Hugging Face directories. */
#include "common/file/file_int.h"

int bt_hf_load(struct bt_model_file *mf, const char *dir, struct bt_err *err)
{
    return BT_FAIL(err, BT_E_UNSUPPORTED, "%s: directories are not read by this build", dir);
}
