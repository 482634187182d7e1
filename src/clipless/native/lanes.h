/* Numbers that are computed side by side. */

#ifndef CLIPLESS_LANES
#define CLIPLESS_LANES

#include "processors.h"
#include <stddef.h>

/* Into every processor's own machine code. */
#define INLINE __attribute__((always_inline)) static inline
#define LANES 16

typedef float lanes __attribute__((vector_size(LANES * sizeof(float)), aligned(sizeof(float))));

#endif
