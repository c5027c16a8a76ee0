# Warnings are errors in our code, and no concern of those who use the installed libraries; sanitizers and CUDA are
# chosen here and nowhere else.
add_library(nfp_options INTERFACE)
target_compile_features(nfp_options INTERFACE cxx_std_20)
target_include_directories(nfp_options INTERFACE
  "$<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/src>" "$<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}/nestedfp>")
function(nfp_own_cxx_options)
  target_compile_options(nfp_options INTERFACE "$<BUILD_INTERFACE:$<$<COMPILE_LANGUAGE:CXX>:${ARGN}>>")
endfunction()
nfp_own_cxx_options(-Wall -Wextra -Wpedantic -Wshadow -Wnon-virtual-dtor -Woverloaded-virtual -Werror)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # False positives of GCC 12's and 13's middle end on std::optional, std::variant and std::string at -O2.
  nfp_own_cxx_options(-Wno-maybe-uninitialized -Wno-restrict -Wno-stringop-overflow -Wno-array-bounds)
endif()
# No contraction of a*b+c behind our back: results must be the same on every path (see docs/architecture.md).
nfp_own_cxx_options(-ffp-contract=off)

if(NFP_SANITIZE)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    nfp_own_cxx_options(-Wno-mismatched-new-delete)  # of Asio's coroutine frames, whose allocators the sanitizers split
  endif()
  nfp_own_cxx_options(-fsanitize=${NFP_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all)
  target_link_options(nfp_options INTERFACE -fsanitize=${NFP_SANITIZE})
endif()

find_package(Threads REQUIRED)
target_link_libraries(nfp_options INTERFACE Threads::Threads)

find_program(CCACHE_PROGRAM ccache)
if(CCACHE_PROGRAM)
  set(CMAKE_CXX_COMPILER_LAUNCHER "${CCACHE_PROGRAM}")
  set(CMAKE_CUDA_COMPILER_LAUNCHER "${CCACHE_PROGRAM}")
endif()

set(NFP_HAVE_CUDA OFF)
if(NOT NFP_CUDA STREQUAL "OFF")
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    set(CMAKE_CUDA_ARCHITECTURES OFF)  # the flags below name sm_90a exactly
    enable_language(CUDA)
    if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake 3.25 does not know it for nvcc 13
      set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
      set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
    endif()
    set(CMAKE_CUDA_STANDARD 20)
    set(CMAKE_CUDA_STANDARD_REQUIRED ON)
    set(NFP_HAVE_CUDA ON)
    target_compile_options(nfp_options INTERFACE
      "$<BUILD_INTERFACE:$<$<COMPILE_LANGUAGE:CUDA>:-gencode=arch=compute_90a,code=sm_90a;--expt-relaxed-constexpr;-Xcompiler=-Wall,-Wextra>>")
  elseif(NFP_CUDA STREQUAL "ON")
    message(FATAL_ERROR "NFP_CUDA=ON but nvcc was not found; install the CUDA 13 toolkit or set -DCMAKE_CUDA_COMPILER")
  endif()
endif()
if(NFP_HAVE_CUDA)
  message(STATUS "nestedfp: CUDA code is compiled (${CMAKE_CUDA_COMPILER}, sm_90a)")
else()
  message(STATUS "nestedfp: CPU only (no nvcc, or NFP_CUDA=OFF)")
endif()
