// A libnvidia-ml.so.1 with two GPUs, for tests: handles are checked, and energy grows by a joule at each question.
namespace {
constexpr int kInvalidArgument = 2;
int gpus[2];
unsigned long long millijoules = 1000;
}  // namespace

extern "C" {

int nvmlInit_v2() { return 0; }
int nvmlDeviceGetCount_v2(unsigned* count) {
  *count = 2;
  return 0;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** device) {
  if (index >= 2) return kInvalidArgument;
  *device = &gpus[index];
  return 0;
}
int nvmlDeviceGetHandleByUUID(const char* uuid, void** device) {
  if (uuid[0] != 'G') return kInvalidArgument;
  *device = &gpus[1];
  return 0;
}
int nvmlDeviceGetTotalEnergyConsumption(void* device, unsigned long long* energy) {
  if (device != &gpus[0] && device != &gpus[1]) return kInvalidArgument;
  *energy = millijoules += 1000;
  return 0;
}
}
