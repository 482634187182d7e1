/* Numbers that are computed side by side. */

#ifndef CLIPLESS_LANES
#define CLIPLESS_LANES

#include "processors.h"
#include <stddef.h>

/* Into every processor's own machine code. */
#define INLINE __attribute__((always_inline)) static inline
#define LANES 16

/* As many as a register of 512, 256 and 128 bits has. Sums in vectors that are wider than the processor's registers would go
   through memory, number by number. */
typedef float lanes_512 __attribute__((vector_size(64), aligned(sizeof(float))));
typedef float lanes_256 __attribute__((vector_size(32), aligned(sizeof(float))));
typedef float lanes_128 __attribute__((vector_size(16), aligned(sizeof(float))));

#endif
