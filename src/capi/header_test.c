/* The headers of include/ are C. */
#include "nestedfp.h"
#include "nestedfp_engine.h"
#include "nestedfp_torch.h"

int nfp_header_in_c(void);
int nfp_header_in_c(void) {
  nfp_step_load load = {sizeof(nfp_step_load), 1, 0, 1, 0, 0.0, 0.0, 0.0, 0};
  nfp_step_work work = {sizeof(nfp_step_work), 0, 0, 0, 0};
  return load.step_tokens == 1 && work.sequences == 0 ? nfp_abi_version() : -1;
}
