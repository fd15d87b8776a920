//! Settings and their TOML documents: each setting is declared once (`section`), documents are parsed with positions and read
//! strictly, so that one pass finds every error. Knows no agent and no server.

pub mod choice;
pub mod document;
pub mod kinds;
pub mod known_keys;
pub mod positions;
pub mod quantity;
pub mod schema;
pub mod section;
pub mod suggestion;
pub mod table_reader;
