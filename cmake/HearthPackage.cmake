# What CPack makes: a .deb, and an archive that runs from any folder (tools/package configures for each).
option(HEARTH_BUNDLE "Install the libraries of the distribution beside the program, all but the C library's" OFF)
set(HEARTH_PACKAGE_REVISION 1 CACHE STRING "Revision of the .deb; tools/package names the Debian release in it")
set(HEARTH_MAINTAINER "A local build of hearth <root@localhost>" CACHE STRING
    "Maintainer of the .deb; tools/package names whoever answers for a package that others get")

if(HEARTH_BUNDLE)
  # DT_RPATH, unlike DT_RUNPATH, also says where libraries find those that they need themselves.
  set_target_properties(hearth PROPERTIES INSTALL_RPATH "$ORIGIN/../lib/hearth")
  target_link_options(hearth PRIVATE -Wl,--disable-new-dtags)
  install(TARGETS hearth RUNTIME_DEPENDENCY_SET libraries)
  install(RUNTIME_DEPENDENCY_SET libraries DESTINATION lib/hearth
          PRE_EXCLUDE_REGEXES "^ld-linux" "^lib(c|m|dl|rt|pthread|resolv|util)\\.so")
  install(CODE "set(architecture ${CMAKE_LIBRARY_ARCHITECTURE})")
  install(CODE "set(licences \"${CMAKE_INSTALL_DOCDIR}/libraries\")")
  install(SCRIPT ${CMAKE_SOURCE_DIR}/cmake/package/licences.cmake)
endif()

set(CPACK_PACKAGE_NAME hearth)
set(CPACK_PACKAGE_VENDOR "The hearth authors")
set(CPACK_PACKAGE_CONTACT ${HEARTH_MAINTAINER})
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "language models larger than the GPU's memory, fast, on one PC")
set(CPACK_PACKAGE_FILE_NAME hearth-${PROJECT_VERSION}-${CMAKE_SYSTEM_NAME}-${CMAKE_SYSTEM_PROCESSOR})
set(CPACK_STRIP_FILES ON)
set(CPACK_THREADS 0)
set(CPACK_VERBATIM_VARIABLES ON)

set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_RELEASE ${HEARTH_PACKAGE_REVISION})
set(CPACK_DEBIAN_PACKAGE_SECTION science)
set(CPACK_DEBIAN_COMPRESSION_TYPE xz)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_DESCRIPTION
"hearth runs language models that do not fit the GPU. It computes only the
neurons that a token needs: hot ones on the GPU, cold ones on the CPU, at the
same time. It reads llama.cpp's GGUF files, answers over HTTP, and comes with
a small model to try. A GPU is not needed.")
set(CPACK_DEBIAN_PACKAGE_RECOMMENDS ca-certificates)  # hearth pull
if(HEARTH_HAS_CUDA)  # loaded when a GPU is used; NVIDIA's package
  string(REGEX MATCH "^([0-9]+)\\.([0-9]+)" cuda_version ${CUDAToolkit_VERSION})
  set(CPACK_DEBIAN_PACKAGE_SUGGESTS "libcublas-${CMAKE_MATCH_1}-${CMAKE_MATCH_2}")
endif()
include(CPack)
