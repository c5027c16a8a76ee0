# One CMake target per folder, so that the linker keeps the arrows of docs/architecture.md.
#
#   nfp_library(text SOURCES a.cc b.cc TESTS a_test.cc b_test.cc DEPS base PRIVATE_DEPS nfp::pcre2)
#
# makes nfp_text (static) and, with tests on, one test program nfp_text_test whose cases ctest lists one by one.
# DEPS names other folders; they may only be lower ones. With UNITY, up to eight files are compiled as one (unless
# NFP_UNITY is OFF), which reads and instantiates the headers that they share once: what they declare in unnamed
# namespaces must then have different names.
include(GoogleTest)

function(nfp_unity target)
  if(NFP_UNITY)
    set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 8)
  endif()
endfunction()

function(nfp_library name)
  cmake_parse_arguments(ARG "UNITY" "" "SOURCES;TESTS;DEPS;PUBLIC_DEPS;PRIVATE_DEPS;TEST_DEPS" ${ARGN})
  add_library(nfp_${name} STATIC ${ARG_SOURCES})
  if(ARG_UNITY)
    nfp_unity(nfp_${name})
  endif()
  list(TRANSFORM ARG_DEPS PREPEND nfp_)
  target_link_libraries(nfp_${name} PUBLIC nfp_options ${ARG_DEPS} ${ARG_PUBLIC_DEPS} PRIVATE ${ARG_PRIVATE_DEPS})
  if(NFP_BUILD_TESTS AND ARG_TESTS)
    nfp_test(nfp_${name}_test SOURCES ${ARG_TESTS} DEPS nfp_${name} ${ARG_PRIVATE_DEPS} ${ARG_TEST_DEPS})
  endif()
endfunction()

# Of tests: NFP_SOURCE_DIR and NFP_BINARY_DIR reach them as macros. Where they need not be FAST, a Release optimises their
# own code less than what they test, and several files are compiled as one.
function(nfp_test_code target fast)
  target_compile_definitions(${target} PRIVATE
    NFP_SOURCE_DIR="${PROJECT_SOURCE_DIR}" NFP_BINARY_DIR="${PROJECT_BINARY_DIR}")
  if(NOT fast)
    target_compile_options(${target} PRIVATE $<$<CONFIG:Release>:-O1>)
    nfp_unity(${target})
  endif()
endfunction()

# One gtest program. LABELS go to every case of it, and FIXTURES name ctest fixtures that all of them need (tests/ makes
# tiny_models). FAST: its own code, such as references, is what takes its time.
function(nfp_test name)
  cmake_parse_arguments(ARG "FAST" "" "SOURCES;DEPS;LABELS;FIXTURES" ${ARGN})
  add_executable(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE nfp_options ${ARG_DEPS} GTest::gtest GTest::gtest_main nfp::rapidcheck)
  nfp_test_code(${name} ${ARG_FAST})
  if(NOT ARG_LABELS)
    set(ARG_LABELS unit)
  endif()
  gtest_discover_tests(${name} DISCOVERY_TIMEOUT 60 PROPERTIES LABELS "${ARG_LABELS}" TIMEOUT 900
    FIXTURES_REQUIRED "${ARG_FIXTURES}" SKIP_REGULAR_EXPRESSION "\\[  SKIPPED \\]")
endfunction()

# Fails where a test or a fuzz target is named by no CMakeLists.txt of its folder or one above: it would never be run, and
# nobody would see that.
function(nfp_check_tests_are_named)
  file(GLOB_RECURSE tests CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/src/*_test.cc" "${PROJECT_SOURCE_DIR}/src/*_fuzz.cc"
    "${PROJECT_SOURCE_DIR}/tests/*_test.cc")
  foreach(test IN LISTS tests)
    set(named FALSE)
    set(folder "${test}")
    while(NOT named AND NOT folder STREQUAL PROJECT_SOURCE_DIR)
      cmake_path(GET folder PARENT_PATH folder)
      if(EXISTS "${folder}/CMakeLists.txt")
        file(READ "${folder}/CMakeLists.txt" text)
        cmake_path(RELATIVE_PATH test BASE_DIRECTORY "${folder}" OUTPUT_VARIABLE name)
        if(text MATCHES "(^|[ \n(])${name}[ \n)]")
          set(named TRUE)
        endif()
      endif()
    endwhile()
    if(NOT named)
      message(SEND_ERROR "${test} is named by no CMakeLists.txt: it would not be built, nor run")
    endif()
  endforeach()
endfunction()

# One ctest entry that runs a Python script: nfp_python_test(tokenizer_oracle oracle.py ARGS $<TARGET_FILE:tool>).
# LABELS and FIXTURES are as in nfp_test.
# The script exits 0 when all is right and 77 where it has to skip (a module or the demo model is not there), saying why.
find_program(NFP_PYTHON python3 DOC "Python that runs the tests written in Python (scripts/test passes its own environment's)")
function(nfp_python_test name script)
  cmake_parse_arguments(ARG "" "" "ARGS;LABELS;FIXTURES" ${ARGN})
  if(NOT NFP_BUILD_TESTS OR NOT NFP_PYTHON)
    return()
  endif()
  cmake_path(ABSOLUTE_PATH script BASE_DIRECTORY "${CMAKE_CURRENT_SOURCE_DIR}")
  if(NOT ARG_LABELS)
    set(ARG_LABELS unit)
  endif()
  add_test(NAME ${name} COMMAND "${NFP_PYTHON}" "${script}" ${ARG_ARGS})
  set_tests_properties(${name} PROPERTIES LABELS "${ARG_LABELS}" TIMEOUT 900 SKIP_RETURN_CODE 77
    FIXTURES_REQUIRED "${ARG_FIXTURES}" ENVIRONMENT "PYTHONDONTWRITEBYTECODE=1;NFP_SANITIZE=${NFP_SANITIZE}")
endfunction()

# A libFuzzer target: NAME.cc with LLVMFuzzerTestOneInput; SEEDS is a folder of inputs to start from. Without
# NFP_BUILD_FUZZERS nothing is built.
function(nfp_fuzzer name)
  cmake_parse_arguments(ARG "" "SEEDS" "SOURCES;DEPS" ${ARGN})
  if(NFP_BUILD_FUZZERS)
    add_executable(${name} ${ARG_SOURCES})
    target_link_libraries(${name} PRIVATE nfp_options ${ARG_DEPS})
    target_link_options(${name} PRIVATE -fsanitize=fuzzer)
    if(ARG_SEEDS)
      cmake_path(ABSOLUTE_PATH ARG_SEEDS BASE_DIRECTORY "${CMAKE_CURRENT_SOURCE_DIR}")
    endif()
    set_property(GLOBAL APPEND_STRING PROPERTY NFP_FUZZERS "${name}\t$<TARGET_FILE:${name}>\t${ARG_SEEDS}\n")
  endif()
endfunction()

# fuzzers.txt in the build folder: one line per target (name, program, seeds) for scripts/test --fuzz.
function(nfp_write_fuzzer_list)
  if(NFP_BUILD_FUZZERS)
    get_property(fuzzers GLOBAL PROPERTY NFP_FUZZERS)
    file(GENERATE OUTPUT "${PROJECT_BINARY_DIR}/fuzzers.txt" CONTENT "${fuzzers}")
  endif()
endfunction()
