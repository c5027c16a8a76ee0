# What the shell and man(1) know of the program, made by the program itself; and a .deb:
#   cmake --preset app && cmake --build build/app && (cd build/app && cpack)
if(TARGET nestedfp)
  set(shell_folder "${PROJECT_BINARY_DIR}/shell")
  file(MAKE_DIRECTORY "${shell_folder}")
  add_custom_command(OUTPUT "${shell_folder}/nestedfp" "${shell_folder}/_nestedfp" "${shell_folder}/nestedfp.fish" "${shell_folder}/nestedfp.1"
    COMMAND nestedfp completion bash > nestedfp
    COMMAND nestedfp completion zsh > _nestedfp
    COMMAND nestedfp completion fish > nestedfp.fish
    COMMAND nestedfp man-page > nestedfp.1
    DEPENDS nestedfp WORKING_DIRECTORY "${shell_folder}" COMMENT "Completions and manual page of nestedfp" VERBATIM)
  add_custom_target(nestedfp_shell ALL DEPENDS "${shell_folder}/nestedfp.1")
  install(FILES "${shell_folder}/nestedfp" DESTINATION "${CMAKE_INSTALL_DATADIR}/bash-completion/completions")
  install(FILES "${shell_folder}/_nestedfp" DESTINATION "${CMAKE_INSTALL_DATADIR}/zsh/site-functions")
  install(FILES "${shell_folder}/nestedfp.fish" DESTINATION "${CMAKE_INSTALL_DATADIR}/fish/vendor_completions.d")
  install(FILES "${shell_folder}/nestedfp.1" DESTINATION "${CMAKE_INSTALL_MANDIR}/man1")
  install(FILES packaging/nestedfp.service DESTINATION lib/systemd/system)
  install(FILES packaging/serve.toml packaging/Containerfile DESTINATION "${CMAKE_INSTALL_DOCDIR}/examples")
endif()

# Debian asks for somebody to write to about a package: who makes one for others gives a name and an address.
set(NFP_MAINTAINER "nestedfp <root@localhost>" CACHE STRING "Maintainer of the Debian package: \"NAME <ADDRESS>\"")
set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_NAME nestedfp)
set(CPACK_PACKAGE_VENDOR "nestedfp")
set(CPACK_PACKAGE_CONTACT "${NFP_MAINTAINER}")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "large language models in FP16 or FP8 from one copy of the weights")
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_STRIP_FILES ON)
set(CPACK_COMPONENTS_ALL program)  # the C++ API is for find_package in a tree of one's own
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PROGRAM_PACKAGE_NAME nestedfp)
set(CPACK_DEBIAN_PROGRAM_DESCRIPTION "One 16-bit copy of a model's weights is run in exact FP16 or in FP8, step by
 step: nestedfp generates, chats, and serves OpenAI's API over HTTP.")
set(CPACK_DEBIAN_PROGRAM_PACKAGE_SECTION science)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
# libcurl is loaded at run time (src/hub/libcurl.h), which shlibdeps cannot see; t64 is Ubuntu's name of it.
set(CPACK_DEBIAN_PROGRAM_PACKAGE_DEPENDS "libcurl4 | libcurl4t64")
set(CPACK_DEBIAN_PROGRAM_PACKAGE_RECOMMENDS "ca-certificates")
set(CPACK_DEBIAN_PROGRAM_PACKAGE_CONTROL_EXTRA
  "${PROJECT_SOURCE_DIR}/packaging/debian/postinst;${PROJECT_SOURCE_DIR}/packaging/debian/prerm;${PROJECT_SOURCE_DIR}/packaging/debian/postrm")
include(CPack)
