# One CMake target per folder, so that the linker keeps the arrows of docs/architecture.md.
#
#   nfp_library(text SOURCES a.cc b.cc TESTS a_test.cc b_test.cc DEPS base PRIVATE_DEPS nfp::pcre2)
#
# makes nfp_text (static) and, with tests on, one test program nfp_text_test whose cases ctest lists one by one.
# DEPS names other folders; they may only be lower ones.
include(GoogleTest)

function(nfp_library name)
  cmake_parse_arguments(ARG "" "" "SOURCES;TESTS;DEPS;PUBLIC_DEPS;PRIVATE_DEPS;TEST_DEPS" ${ARGN})
  add_library(nfp_${name} STATIC ${ARG_SOURCES})
  list(TRANSFORM ARG_DEPS PREPEND nfp_)
  target_link_libraries(nfp_${name} PUBLIC nfp_options ${ARG_DEPS} ${ARG_PUBLIC_DEPS} PRIVATE ${ARG_PRIVATE_DEPS})
  if(NFP_BUILD_TESTS AND ARG_TESTS)
    nfp_test(nfp_${name}_test SOURCES ${ARG_TESTS} DEPS nfp_${name} ${ARG_PRIVATE_DEPS} ${ARG_TEST_DEPS})
  endif()
endfunction()

# One gtest program. LABELS go to every case of it; NFP_TEST_DATA and NFP_SHARED_DATA reach it as macros.
function(nfp_test name)
  cmake_parse_arguments(ARG "" "" "SOURCES;DEPS;LABELS" ${ARGN})
  add_executable(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE nfp_options ${ARG_DEPS} GTest::gtest GTest::gtest_main nfp::rapidcheck)
  target_compile_definitions(${name} PRIVATE
    NFP_SOURCE_DIR="${PROJECT_SOURCE_DIR}" NFP_BINARY_DIR="${PROJECT_BINARY_DIR}")
  if(NOT ARG_LABELS)
    set(ARG_LABELS unit)
  endif()
  gtest_discover_tests(${name} DISCOVERY_TIMEOUT 60 PROPERTIES LABELS "${ARG_LABELS}" TIMEOUT 900
    SKIP_REGULAR_EXPRESSION "\\[  SKIPPED \\]")
endfunction()

# A libFuzzer target: fuzz/NAME.cc with LLVMFuzzerTestOneInput. Without NFP_BUILD_FUZZERS nothing is built.
function(nfp_fuzzer name)
  cmake_parse_arguments(ARG "" "" "SOURCES;DEPS" ${ARGN})
  if(NFP_BUILD_FUZZERS)
    add_executable(${name} ${ARG_SOURCES})
    target_link_libraries(${name} PRIVATE nfp_options ${ARG_DEPS})
    target_link_options(${name} PRIVATE -fsanitize=fuzzer)
    set_property(GLOBAL APPEND PROPERTY NFP_FUZZERS ${name})
  endif()
endfunction()
