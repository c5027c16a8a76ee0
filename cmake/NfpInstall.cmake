# What `cmake --install` puts where, in two components:
#   program       bin/nestedfp and the documentation
#   development   the C++ API: headers in include/nestedfp, static libraries, and a package for find_package(nestedfp):
#                   find_package(nestedfp REQUIRED)
#                   target_link_libraries(mine PRIVATE nestedfp::runtime)
include(CMakePackageConfigHelpers)

set(CMAKE_INSTALL_DEFAULT_COMPONENT_NAME program)
install(FILES README.md LICENSE DESTINATION "${CMAKE_INSTALL_DOCDIR}")
install(DIRECTORY docs/ DESTINATION "${CMAKE_INSTALL_DOCDIR}")
if(TARGET nestedfp)
  install(TARGETS nestedfp RUNTIME)
endif()

install(TARGETS nestedfp_c nestedfp_engine_c LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}" COMPONENT development)
install(FILES include/nestedfp.h include/nestedfp_torch.h include/nestedfp_engine.h DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}" COMPONENT development)

# Our libraries and the third-party ones that they name, wherever they were made.
function(nfp_libraries_below folder out)
  get_property(targets DIRECTORY "${folder}" PROPERTY BUILDSYSTEM_TARGETS)
  set(found)
  foreach(target IN LISTS targets)
    get_target_property(type ${target} TYPE)
    if(target MATCHES "^nfp_" AND NOT target MATCHES "_testing$" AND type MATCHES "^(STATIC|INTERFACE)_LIBRARY$")
      list(APPEND found ${target})
    endif()
  endforeach()
  get_property(subfolders DIRECTORY "${folder}" PROPERTY SUBDIRECTORIES)
  foreach(subfolder IN LISTS subfolders)
    cmake_path(RELATIVE_PATH subfolder BASE_DIRECTORY "${PROJECT_SOURCE_DIR}" OUTPUT_VARIABLE place)
    if(NOT place MATCHES "^(apps|bench|tests)")
      nfp_libraries_below("${subfolder}" more)
      list(APPEND found ${more})
    endif()
  endforeach()
  set(${out} ${found} PARENT_SCOPE)
endfunction()

nfp_libraries_below("${PROJECT_SOURCE_DIR}" libraries)
foreach(library IN LISTS libraries)
  string(REGEX REPLACE "^nfp_" "" exported "${library}")
  set_target_properties(${library} PROPERTIES EXPORT_NAME ${exported})
endforeach()
set(package_folder "${CMAKE_INSTALL_LIBDIR}/cmake/nestedfp")
install(TARGETS ${libraries} EXPORT nestedfp ARCHIVE DESTINATION "${CMAKE_INSTALL_LIBDIR}" COMPONENT development)
install(EXPORT nestedfp NAMESPACE nestedfp:: FILE nestedfpTargets.cmake DESTINATION "${package_folder}" COMPONENT development)
configure_package_config_file(cmake/nestedfpConfig.cmake.in "${PROJECT_BINARY_DIR}/nestedfpConfig.cmake"
  INSTALL_DESTINATION "${package_folder}")
write_basic_package_version_file("${PROJECT_BINARY_DIR}/nestedfpConfigVersion.cmake" COMPATIBILITY SameMinorVersion)
install(FILES "${PROJECT_BINARY_DIR}/nestedfpConfig.cmake" "${PROJECT_BINARY_DIR}/nestedfpConfigVersion.cmake"
  DESTINATION "${package_folder}" COMPONENT development)

# Public headers: all but what serves tests, what is a part of another file, and what a backend keeps to itself, where
# only its maker's header is for others.
file(GLOB_RECURSE headers CONFIGURE_DEPENDS RELATIVE "${PROJECT_SOURCE_DIR}/src" "${PROJECT_SOURCE_DIR}/src/*.h")
foreach(header IN LISTS headers)
  # Wiring of the program, and of the C libraries: no API. libcurl.h would ask every user for curl's headers.
  if(header MATCHES "^(server|capi|doctor|shell|tune|portable)/|^hub/libcurl\\.h$")
    continue()
  endif()
  if(header MATCHES "^backend/(cpu|cuda)/" AND NOT header MATCHES "^backend/(cpu|cuda)/(cpu|cuda)_backend\\.h$")
    continue()
  endif()
  if(header MATCHES "(_inl|_fuzz|_test|_kernels|/version)\\.h$" OR header MATCHES "(^|/)testing/")
    continue()
  endif()
  cmake_path(GET header PARENT_PATH folder)
  install(FILES "src/${header}" DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}/nestedfp/${folder}" COMPONENT development)
endforeach()
