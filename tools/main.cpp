#include "tools/cli.h"

int main(int argc, char** argv) {
  return hearth::tools::hearth_main(argc, argv);
}
