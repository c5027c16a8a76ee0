// Stands in for the driver's libnvidia-ml: two GPUs, "GPU-a" and "GPU-b", that have used 1 and 10 joules. Whatever is
// not a handle that it gave out is refused.
#include <cstring>

namespace {
int devices[2];
}

extern "C" {

int nvmlInit_v2() { return 0; }

int nvmlDeviceGetCount_v2(unsigned* count) {
  *count = 2;
  return 0;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** device) {
  if (index > 1) return 2;  // NVML_ERROR_INVALID_ARGUMENT
  *device = &devices[index];
  return 0;
}

int nvmlDeviceGetHandleByUUID(const char* uuid, void** device) {
  if (std::strcmp(uuid, "GPU-a") != 0 && std::strcmp(uuid, "GPU-b") != 0) return 6;  // NVML_ERROR_NOT_FOUND
  *device = &devices[uuid[4] - 'a'];
  return 0;
}

int nvmlDeviceGetTotalEnergyConsumption(void* device, unsigned long long* millijoules) {
  if (device != &devices[0] && device != &devices[1]) return 2;
  *millijoules = device == &devices[0] ? 1000 : 10'000;
  return 0;
}
}
