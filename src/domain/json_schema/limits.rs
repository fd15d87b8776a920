//! Bounds of schemas and validations. Schemas and values may be hostile.

use std::time::Duration;

/// The most bytes of a schema.
pub const MAX_SCHEMA_BYTES: usize = 256 << 10;
/// The most patterns of a schema.
pub const MAX_PATTERNS: usize = 100;
/// The most bytes of all patterns of a schema together: parsing a pattern takes up to 25 µs per byte.
pub const MAX_PATTERN_BYTES: usize = 16 << 10;
/// The most references of a schema times its levels of nesting, which bounds the depth of the stack.
pub const MAX_LEVELS: usize = 10_000;
/// The size limits of a compiled pattern, in bytes. The smallest limit that suffices for all patterns of a schema bounds
/// the length of a string: a match takes time for each byte of both, and cannot be interrupted.
pub const PATTERN_SIZES: [usize; 3] = [16 << 10, 64 << 10, 256 << 10];
/// The most bytes of a pattern times bytes of a string in one match; takes about a second.
pub const MAX_MATCH_COST: usize = 10 << 30;

/// The most reads of a value that decide whether it is valid. They take less than a second; benign schemas need far less.
pub const MAX_READS: u64 = 10_000_000;
/// The most reads that collect errors. Lower, because each read may produce an error.
pub const MAX_READS_FOR_ERRORS: u64 = 1_000_000;
/// The most bytes that the errors of a validation copy from the value and the schema.
pub const MAX_ERROR_BYTES: usize = 256 << 20;
/// The time limit of one validation.
pub const TIMEOUT: Duration = Duration::from_secs(2);
/// The stack for compiling and validating.
pub const STACK_BYTES: usize = 256 << 20;
/// The part of the stack that a validation may use.
pub const CHECK_STACK_BYTES: usize = STACK_BYTES / 2;

/// Bounds of inline validations: about a millisecond, and a part of the stack of a runtime's thread.
pub const MAX_INLINE_BYTES: usize = 16 << 10;
pub const MAX_INLINE_LEVELS: usize = 256;
pub const MAX_INLINE_PATTERNS: usize = 16;
pub const MAX_INLINE_PATTERN_BYTES: usize = 256;
pub const MAX_INLINE_READS: u64 = 10_000;
pub const MAX_INLINE_STACK: usize = 256 << 10;
/// The reads that matching one byte against the largest pattern costs inline.
pub const INLINE_READS_PER_BYTE: u64 = 50;
