/* amx.h: what every user of the tile unit needs: eight full tiles of 16 rows by 64 bytes. */
#ifndef CB_AMX_H
#define CB_AMX_H

#include <immintrin.h>
#include <stdint.h>

#ifndef CB_TILE_CONFIG /* gcc 12's _tile_loadconfig lets the compiler know of 8 of the 64 bytes only */
#define CB_TILE_CONFIG(config) __asm__ volatile("ldtilecfg %0" : : "m"(config))
#endif
/* Nor do its tile loads say that they read memory. */
#define STORES_ARE_DONE() __asm__ volatile("" : : : "memory")

/* The layout that ldtilecfg reads. Every tile is full: missing rows and inputs are zeros. */
typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t n_rows[16];
} tile_config;
static const _Alignas(64) tile_config full_tiles = {
    .palette = 1, .row_bytes = {64, 64, 64, 64, 64, 64, 64, 64}, .n_rows = {16, 16, 16, 16, 16, 16, 16, 16}};

#endif
