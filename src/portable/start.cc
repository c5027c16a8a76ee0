// What crt1.o calls. Since glibc 2.34 it leaves it to libc to run the program's constructors, which an older libc does
// only when it is given a function that does.

using Initializer = void(int argc, char** argv, char** environment);
using Main = int(int argc, char** argv, char** environment);

// NOLINTBEGIN(bugprone-reserved-identifier): libc's names
extern "C" {

extern Initializer* __init_array_start[] __attribute__((visibility("hidden")));
extern Initializer* __init_array_end[] __attribute__((visibility("hidden")));
void _init();

asm(".symver nfp_old_libc_start_main,__libc_start_main@GLIBC_2.2.5");
int nfp_old_libc_start_main(Main*, int, char**, Initializer*, void (*)(), void (*)(), void*);

static void run_constructors(int argc, char** argv, char** environment) {
  _init();
  for (Initializer** each = __init_array_start; each != __init_array_end; ++each) (*each)(argc, argv, environment);
}

int __libc_start_main(Main* main, int argc, char** argv, Initializer*, void (*fini)(), void (*rtld_fini)(),
                      void* stack_end) {
  return nfp_old_libc_start_main(main, argc, argv, run_constructors, fini, rtld_fini, stack_end);
}

}  // extern "C"
// NOLINTEND(bugprone-reserved-identifier)
