# cmake -DVARIABLE=kName -DINPUT=file -DOUTPUT=file.cc -P NfpEmbed.cmake: writes INPUT as `nfp::server::kName`.
file(READ "${INPUT}" bytes HEX)
string(REGEX REPLACE "([0-9a-f][0-9a-f])" "'\\\\x\\1'," bytes "${bytes}")
string(REGEX REPLACE "('[^']*','[^']*','[^']*','[^']*','[^']*','[^']*','[^']*','[^']*',)" "\\1\n" bytes "${bytes}")
cmake_path(GET INPUT FILENAME name)
file(WRITE "${OUTPUT}" "// Made from ${name} by the build.\n#include <string_view>\n\n#include \"server/serve/embedded.h\"\n\n"
  "namespace nfp::server {\nnamespace {\nconstexpr char ${VARIABLE}Bytes[] = {\n${bytes}'\\0'};\n}  // namespace\n\n"
  "const std::string_view ${VARIABLE}(${VARIABLE}Bytes, sizeof(${VARIABLE}Bytes) - 1);\n\n}  // namespace nfp::server\n")
