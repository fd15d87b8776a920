//! How much of its stack a thread uses, to end a recursion of a library before the stack is full.

/// The approximate current end of the stack. The difference of two is the size of what lies between.
#[inline(always)]
pub fn pointer() -> usize {
    let here = 0_u8;
    std::ptr::from_ref(&here).addr()
}
