//! A picture and a file, as small as they can be.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

/// One grey pixel.
pub const PNG: &[u8] = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\0\x01\0\0\0\x01\x08\0\0\0\0:~\x9bU\0\0\0\nIDATx\x9cch\0\0\0\x82\0\x81w\xcdr\xb6\0\0\0\0IEND\xaeB`\x82";
/// A document without a page.
pub const PDF: &[u8] = b"%PDF-1.4\n1 0 obj<</Type/Catalog/Pages 2 0 R>>endobj 2 0 obj<</Type/Pages/Kids[]/Count 0>>endobj\ntrailer<</Root 1 0 R>>";

/// The bytes in Base64.
pub fn base64(data: &[u8]) -> String {
    STANDARD.encode(data)
}

/// A part with this picture.
pub fn picture_part(data: &[u8]) -> Value {
    json!({"type": "image", "media_type": "image/png", "data": base64(data)})
}

/// Another picture: what follows the end of one does not count.
pub fn png_with_suffix(suffix: &str) -> Vec<u8> {
    [PNG, suffix.as_bytes()].concat()
}
