# The wheel's files are to run where the C library is older than the one that they are linked with:
#
#   nfp_portable(target)
#
# has a program or shared library need nothing of glibc that 2.28 lacks (src/portable), and puts the C++ runtime inside.
# Not with sanitizers, which replace the same functions; and linked with glibc before 2.35 a file is as portable as that is.
include(CheckCXXSymbolExists)
check_cxx_symbol_exists(_dl_find_object dlfcn.h NFP_GLIBC_2_35)
set(NFP_PORTABLE OFF)
if(NFP_GLIBC_2_35 AND CMAKE_SYSTEM_PROCESSOR STREQUAL "x86_64" AND NOT NFP_SANITIZE)
  set(NFP_PORTABLE ON)
endif()

function(nfp_portable target)
  get_target_property(type ${target} TYPE)
  if(NOT NFP_SANITIZE)
    target_link_options(${target} PRIVATE -static-libstdc++ -static-libgcc)
    if(type STREQUAL "EXECUTABLE")  # a library has its own exports
      target_link_options(${target} PRIVATE "LINKER:--version-script=${PROJECT_SOURCE_DIR}/src/portable/exports.map")
    endif()
  endif()
  if(NFP_PORTABLE)
    target_sources(${target} PRIVATE $<TARGET_OBJECTS:nfp_glibc>)
    if(type STREQUAL "EXECUTABLE")
      target_sources(${target} PRIVATE $<TARGET_OBJECTS:nfp_glibc_start>)
    endif()
    # What is a part of libc today is in libraries of its own in the old one.
    target_link_options(${target} PRIVATE
      "LINKER:--push-state,--no-as-needed,-l:libpthread.so.0,-l:libdl.so.2,-l:librt.so.1,--pop-state")
  endif()
endfunction()
