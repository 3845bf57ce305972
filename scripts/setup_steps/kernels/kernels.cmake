# Puts homespec's kernels in front of llamafile_sgemm. Called when llama.cpp's targets are there; where the
# linker or the CPU is another one, llama.cpp stays as it is.
if(TARGET ggml-cpu AND GGML_LLAMAFILE AND NOT GGML_BACKEND_DL AND NOT GGML_LTO AND CMAKE_SYSTEM_NAME STREQUAL "Linux"
   AND CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64)$")
    target_sources(ggml-cpu PRIVATE ${CMAKE_CURRENT_LIST_DIR}/k_quants.cpp ${CMAKE_CURRENT_LIST_DIR}/k_quants_wide.cpp)
    target_link_options(ggml-cpu PRIVATE LINKER:--wrap=llamafile_sgemm)
endif()
