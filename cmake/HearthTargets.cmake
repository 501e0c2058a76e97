# Compile options shared by every target of the project.
add_library(hearth_options INTERFACE)
target_include_directories(hearth_options INTERFACE ${CMAKE_SOURCE_DIR}/src ${CMAKE_SOURCE_DIR})
target_compile_options(hearth_options INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wshadow -Wnon-virtual-dtor -Wno-missing-field-initializers
                            # No FMA contraction and no fast-math outside the per-ISA kernel files: scalar code means what it says.
                            -ffp-contract=off>)
if(HEARTH_WERROR)
  target_compile_options(hearth_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Werror>)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_GREATER_EQUAL 13)
    # It takes the inside of an empty std::optional for read (GCC's bug 80635).
    target_compile_options(hearth_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wno-error=maybe-uninitialized>)
  endif()
endif()
if(HEARTH_SANITIZE)
  target_compile_options(hearth_options INTERFACE
    $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${HEARTH_SANITIZE} -fno-omit-frame-pointer>)
  target_link_options(hearth_options INTERFACE -fsanitize=${HEARTH_SANITIZE})
endif()
if(HEARTH_FUZZ)  # coverage feedback and sanitizers in everything that a target reaches; a finding ends the program
  set(fuzz_options -fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer)
  target_compile_options(hearth_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:${fuzz_options}>)
  target_link_options(hearth_options INTERFACE -fsanitize=address,undefined)
endif()

# hearth_library(NAME [SOURCES...]): static library hearth_NAME of the calling folder. Without SOURCES every .cpp in the folder.
function(hearth_library NAME)
  set(sources ${ARGN})
  if(NOT sources)
    file(GLOB sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/*.cpp)
  endif()
  add_library(hearth_${NAME} STATIC ${sources})
  target_link_libraries(hearth_${NAME} PUBLIC hearth_options)
endfunction()

# hearth_tests(NAME LIBS... ): test binary test_NAME from tests/NAME/*.cpp; every GoogleTest case becomes one ctest entry.
function(hearth_tests NAME)
  cmake_parse_arguments(ARG "" "LABEL" "LIBS" ${ARGN})
  file(GLOB sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/${NAME}/*.cpp)
  if(NOT sources)
    return()
  endif()
  add_executable(test_${NAME} ${sources})
  target_link_libraries(test_${NAME} PRIVATE hearth_options hearth_test_support ${ARG_LIBS} GTest::gtest_main)
  set(properties TIMEOUT 600 SKIP_REGULAR_EXPRESSION "\\[  SKIPPED \\]")
  if(ARG_LABEL)
    list(APPEND properties LABELS ${ARG_LABEL})
  endif()
  gtest_discover_tests(test_${NAME} TEST_PREFIX "${NAME}." DISCOVERY_TIMEOUT 60 PROPERTIES ${properties})
endfunction()
