// Opcodes such as add and mul serve integers, floats and packed halves; each family decodes its own types.
#pragma once
#include "decode.h"

namespace cake::emu {

bool decode_integer_add(Decoder& d, Ins& i, bool subtract, Type t);
void decode_integer_mul(Decoder& d, Ins& i, Type t);
void decode_integer_mad(Decoder& d, Ins& i, bool carry_in, Type t);
void decode_integer_div(Decoder& d, Ins& i, Type t);
void decode_integer_min_max(Decoder& d, Ins& i, bool is_max, Type t);
void decode_integer_unary(Decoder& d, Ins& i, bool negate, Type t);
bool decode_packed16(Decoder& d, Ins& i, int op);  // u16x2, s16x2: 0 add, 1 min, 2 max; false for other types
void decode_store_async(Decoder& d, Ins& i, bool reduces);  // st.async, red.async
void decode_carry_start(Decoder& d, Ins& i, bool subtract);

enum class HalfOp : u8 { Add, Sub, Mul, Min, Max, Abs, Neg, Fma };
void decode_half_binary(Decoder& d, Ins& i, Type t, HalfOp op);
void decode_half_fma(Decoder& d, Ins& i, Type t);
void decode_f32x2(Decoder& d, Ins& i, HalfOp op);
void decode_approx_div(Decoder& d, Ins& i, Type t);
bool decode_half_unary_approx(Decoder& d, Ins& i, Type t, int function);

}  // namespace cake::emu
