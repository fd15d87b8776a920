//! Rate limits: requests wait here before they are sent, so that services have none to refuse.

pub mod bucket;
pub mod headers;
