//! Images and files in messages of other protocols: data URLs, Base64, and URLs that are fetched before the first turn.

use crate::domain::attachment::MediaType;
use crate::domain::content::{AttachmentLink, Part};
use crate::web::body::content::{AttachmentCounter, build_attachment, decode_base64};
use crate::web::error::Problem;

/// What a message says about an image or file.
pub struct AttachmentInput {
    pub is_image: bool,
    /// The declared type of what a URL names.
    pub media_type: Option<MediaType>,
    pub name: Option<String>,
}

impl AttachmentInput {
    /// The part of a data URL, or of a URL that is fetched.
    pub fn from_url(
        self,
        url: String,
        pointer: &str,
        counter: &mut AttachmentCounter,
    ) -> Result<Part, Problem> {
        if let Some(rest) = url.strip_prefix("data:") {
            let Some((_, data)) = rest.split_once(";base64,") else {
                let why = "a data URL has the form data:<type>;base64,<data>";
                return Err(Problem::invalid_field(pointer, why));
            };
            return self.from_base64(data, pointer, counter);
        }
        counter.add_link(&url, pointer)?;
        Ok(Part::Link(AttachmentLink {
            url,
            is_image: self.is_image,
            media_type: self.media_type,
            name: self.name,
        }))
    }

    pub fn from_base64(
        self,
        data: &str,
        pointer: &str,
        counter: &mut AttachmentCounter,
    ) -> Result<Part, Problem> {
        let data = decode_base64(data).map_err(|why| Problem::invalid_field(pointer, why))?;
        counter.add(data.len(), pointer)?;
        build_attachment(data, self.name, pointer).map(Part::from)
    }
}
