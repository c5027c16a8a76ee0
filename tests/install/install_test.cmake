# Installs the build into a folder of its own, then builds and runs a program against what lies there.
# cmake -DBUILD=... -DSOURCE=... -DWORK=... -DMODEL=... -DCXX=... -P install_test.cmake
function(run what)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE code OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT code EQUAL 0)
    message(FATAL_ERROR "${what} failed (${code}):\n${output}")
  endif()
  set(output "${output}" PARENT_SCOPE)
endfunction()

file(REMOVE_RECURSE "${WORK}")
run("installing" "${CMAKE_COMMAND}" --install "${BUILD}" --prefix "${WORK}/prefix")
foreach(file bin/nestedfp include/nestedfp/engine/engine.h include/nestedfp/backend/backend.h share/doc/nestedfp/README.md
        share/doc/nestedfp/format.md share/doc/nestedfp/grafana-dashboard.json share/doc/nestedfp/LICENSE
        share/bash-completion/completions/nestedfp share/zsh/site-functions/_nestedfp
        share/fish/vendor_completions.d/nestedfp.fish share/man/man1/nestedfp.1
        lib/systemd/system/nestedfp.service share/doc/nestedfp/examples/serve.toml)
  if(NOT EXISTS "${WORK}/prefix/${file}")
    message(FATAL_ERROR "the installation lacks ${file}")
  endif()
endforeach()
# What serves tests is no API.
file(GLOB_RECURSE installed RELATIVE "${WORK}/prefix/include/nestedfp" "${WORK}/prefix/include/nestedfp/*")
foreach(file IN LISTS installed)
  if(file MATCHES "testing/|test|scripted|_inl\\.h$")
    message(FATAL_ERROR "the installation has ${file}, which serves tests or is a part of another file")
  endif()
endforeach()
run("the installed program" "${WORK}/prefix/bin/nestedfp" --version)
run("configuring a program against the installation" "${CMAKE_COMMAND}" -S "${SOURCE}" -B "${WORK}/build" -G Ninja
  "-DCMAKE_PREFIX_PATH=${WORK}/prefix" "-DCMAKE_CXX_COMPILER=${CXX}" -DCMAKE_BUILD_TYPE=Release)
run("building a program against the installation" "${CMAKE_COMMAND}" --build "${WORK}/build")
if(NOT EXISTS "${MODEL}/config.json")
  message(STATUS "the program was built but not run: the tiny models were not made (numpy is missing)")
  return()
endif()
run("the program" "${WORK}/build/nestedfp_user" "${MODEL}" "The engine runs")
string(REGEX MATCHALL "(fp16|fp8):( [0-9]+)+\n" lines "${output}")
list(LENGTH lines count)
if(NOT count EQUAL 2)
  message(FATAL_ERROR "the program printed\n${output}")
endif()
