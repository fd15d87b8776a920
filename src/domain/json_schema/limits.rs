//! Bounds of a schema and of a check against it: both may be hostile.

use std::time::Duration;

/// Most bytes of a schema.
pub const MAX_SCHEMA_BYTES: usize = 256 << 10;
/// Most patterns of a schema.
pub const MAX_PATTERNS: usize = 100;
/// Most bytes of all its patterns together: reading one costs up to 25 µs a byte, however small it then becomes.
pub const MAX_PATTERN_BYTES: usize = 16 << 10;
/// Most references of a schema times its levels of nesting: so deep may the stack become.
pub const MAX_LEVELS: usize = 10_000;
/// Most bytes that a pattern takes when it is compiled. The smallest that all patterns of a schema fit in decides how
/// long a text may be: a match takes time for each byte of both, and cannot be broken off.
pub const PATTERN_SIZES: [usize; 3] = [16 << 10, 64 << 10, 256 << 10];
/// Bytes of a pattern times bytes of a text in one match: about a second.
pub const MAX_MATCH_COST: usize = 10 << 30;

/// Most readings of a value for the decision whether it fits: less than a second, and many times what an honest schema
/// needs.
pub const MAX_READS: u64 = 10_000_000;
/// Most that find out what does not fit: each may leave an error behind.
pub const MAX_READS_FOR_ERRORS: u64 = 1_000_000;
/// How long one check may take altogether.
pub const TIMEOUT: Duration = Duration::from_secs(2);
/// Stack that compiling or checking needs at most.
pub const STACK_BYTES: usize = 256 << 20;
/// Part of it that a check may use.
pub const CHECK_STACK_BYTES: usize = STACK_BYTES / 2;

/// Bounds of what is done inline: a millisecond or so, and a part of the stack that a runtime's thread has.
pub const MAX_INLINE_BYTES: usize = 16 << 10;
pub const MAX_INLINE_LEVELS: usize = 256;
pub const MAX_INLINE_PATTERNS: usize = 16;
pub const MAX_INLINE_PATTERN_BYTES: usize = 256;
pub const MAX_INLINE_READS: u64 = 10_000;
pub const MAX_INLINE_STACK: usize = 256 << 10;
/// Readings that matching one byte against the largest pattern costs inline.
pub const INLINE_READS_PER_BYTE: u64 = 50;
