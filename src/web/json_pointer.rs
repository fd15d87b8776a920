//! JSON Pointers (RFC 6901), which name the place of an error in a body.

/// The pointer to the field `name` of what `parent` points at. The empty pointer is the whole body.
pub fn join(parent: &str, name: &str) -> String {
    format!("{parent}/{}", name.replace('~', "~0").replace('/', "~1"))
}
