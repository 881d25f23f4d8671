// One kernel as a library: the kernel on a struct of its parameters.
#include SOURCE

extern "C" void kernel_on_host(const void* params) { KERNEL(*static_cast<const Params*>(params)); }
