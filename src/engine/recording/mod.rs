//! Recordings of trees: [`text`] writes them as TOML, [`read`] reads them, [`playback`] plays them back, and [`accept`] takes over
//! what a test found to be different.

pub mod accept;
pub mod assertions;
pub mod neutral;
pub mod playback;
pub mod read;
pub mod redact;
pub mod text;
