// What a CPU-only torch lacks to record graphs of tensors that say they are on a CUDA device.
//
// The autograd engine asks a device's guard for streams and events, and the accelerator hooks for
// the number of devices. A CPU-only torch has neither for CUDA, and aborts. These stand-ins answer
// that there is one device, and that all its work is done. Torch reads the hooks when it is
// imported, so the library has to be preloaded.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

const c10::Device kDevice(c10::DeviceType::CUDA, 0);

struct Guard : public c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  c10::Stream getStream(c10::Device) const noexcept override { return stream(); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return stream(); }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag)
      const override {
    // Any address that is not null: the engine only asks whether an event was recorded.
    *event = const_cast<c10::Device*>(&kDevice);
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}

  static c10::Stream stream() { return c10::Stream(c10::Stream::DEFAULT, kDevice); }
};

struct Hooks : public at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
};

c10::impl::DeviceGuardImplRegistrar registered_guard(c10::DeviceType::CUDA, new Guard());

}  // namespace

namespace at {
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, ::Hooks)
}
