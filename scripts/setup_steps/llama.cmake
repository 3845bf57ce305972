# Read by CMake at the end of llama.cpp's own project(). llama-cpp-python's CMakeLists force both of
# these on beforehand, and a plain variable outranks what they put into the cache.

# llama.cpp's helpers for its programs: half of the build, and nothing in the wheel calls them.
set(LLAMA_BUILD_COMMON OFF)

if(DEFINED HOMESPEC_METAL)
    set(GGML_METAL ${HOMESPEC_METAL})
endif()

# Once the targets are there: homespec's own kernels.
set(HOMESPEC_KERNELS ${CMAKE_CURRENT_LIST_DIR}/kernels/kernels.cmake)
cmake_language(DEFER CALL include "${HOMESPEC_KERNELS}")
