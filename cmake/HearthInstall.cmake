# What `cmake --install` puts where: the program, man pages, completions, licences and the bundled model.
include(GNUInstallDirs)
set(HEARTH_ZSH_DIR ${CMAKE_INSTALL_DATADIR}/zsh/site-functions CACHE STRING
    "Where zsh looks for completions, below the prefix; Debian's packages use share/zsh/vendor-completions")

set(pages ${CMAKE_BINARY_DIR}/pages)
set(gzip_pages "")
find_program(HEARTH_GZIP gzip)
if(HEARTH_GZIP)  # as distributions have man pages
  set(gzip_pages COMMAND sh -c "${HEARTH_GZIP} -9nf '${pages}/man1/'*.1")
endif()
add_custom_command(OUTPUT ${pages}/_hearth COMMAND hearth-pages ${pages} ${gzip_pages} DEPENDS hearth-pages VERBATIM
                   COMMENT "Making man pages and completions")
add_custom_target(pages ALL DEPENDS ${pages}/_hearth)

install(TARGETS hearth)
install(DIRECTORY ${pages}/man1 DESTINATION ${CMAKE_INSTALL_MANDIR})
install(FILES ${pages}/hearth.bash DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions RENAME hearth)
install(FILES ${pages}/_hearth DESTINATION ${HEARTH_ZSH_DIR})
install(FILES ${pages}/hearth.fish DESTINATION ${CMAKE_INSTALL_DATADIR}/fish/vendor_completions.d)
install(FILES LICENSE cmake/package/copyright CHANGELOG.md DESTINATION ${CMAKE_INSTALL_DOCDIR})
install(FILES models/hearth-demo.gguf DESTINATION ${CMAKE_INSTALL_DATADIR}/hearth)
