// SGD with momentum on some rows of a table, in one pass: what a compiled extension could do.
#include <cstdint>

extern "C" void update(
    float* weight, float* momentum, const float* row, const float* grad, const int64_t* ids,
    int64_t num_rows, int64_t dim, float kept, float lr) {
  for (int64_t i = 0; i < num_rows; ++i) {
    float* weight_row = weight + ids[i] * dim;
    float* momentum_row = momentum + ids[i] * dim;
    for (int64_t d = 0; d < dim; ++d) {
      const float step = kept * momentum_row[d] + grad[i * dim + d];
      momentum_row[d] = step;
      weight_row[d] = row[i * dim + d] - lr * step;
    }
  }
}
