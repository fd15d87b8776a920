//! Why a configured provider cannot be built.

use crate::providers::http_client::base_url::BaseUrlError;
use crate::providers::http_client::headers::HeaderError;
use crate::providers::scripted::script::ScriptError;

/// Each text names the configuration key and what to change.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SetupError {
    #[error(transparent)]
    BaseUrl(#[from] BaseUrlError),
    #[error(transparent)]
    Header(#[from] HeaderError),
    #[error("cannot build the HTTP client: {cause}")]
    HttpClient { cause: String },
    #[error("base_url is no URL that a request can have ({cause})")]
    RequestUrl { cause: String },
    #[error(
        "the environment names a proxy for this service whose URL begins neither with http:// nor https:// (HTTPS_PROXY, HTTP_PROXY or ALL_PROXY); change it, or add the host to NO_PROXY"
    )]
    Proxy,
    #[error("max_tokens_field must be max_tokens or max_completion_tokens")]
    MaxTokensField,
    #[error(transparent)]
    Script(#[from] ScriptError),
}
