//! The services on OpenAI's wires, recognized by their address or by the name of their preset, and what they require. Pure.

use crate::config::OpenAiApi;
use crate::config::presets::is_openai_host;

/// A service whose requests differ from those of other servers on the same wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpenAiService {
    OpenAi,
    Azure,
    Bedrock,
    DeepSeek,
    Gemini,
    Groq,
    Mistral,
    OpenRouter,
    Xai,
    /// A local server, a gateway or a service without rules of its own.
    Other,
}

impl OpenAiService {
    /// The service at this address; at an unknown one, the service whose preset has the provider's name.
    pub fn new(provider: &str, host: &str) -> Self {
        let is_below = |domain: &str| {
            host.strip_suffix(domain)
                .is_some_and(|it| it.ends_with('.'))
        };
        match host {
            host if is_openai_host(host) => Self::OpenAi,
            "api.deepseek.com" => Self::DeepSeek,
            "generativelanguage.googleapis.com" => Self::Gemini,
            "api.groq.com" => Self::Groq,
            "api.mistral.ai" => Self::Mistral,
            "openrouter.ai" => Self::OpenRouter,
            "api.x.ai" => Self::Xai,
            _ if is_below("openai.azure.com")
                || is_below("services.ai.azure.com")
                || is_below("cognitiveservices.azure.com") =>
            {
                Self::Azure
            }
            host if host.starts_with("bedrock-")
                && (is_below("amazonaws.com") || is_below("api.aws")) =>
            {
                Self::Bedrock
            }
            _ if is_below("api.x.ai") => Self::Xai,
            _ => Self::of_preset(provider),
        }
    }

    fn of_preset(name: &str) -> Self {
        match name {
            "azure" => Self::Azure,
            "bedrock" => Self::Bedrock,
            "deepseek" => Self::DeepSeek,
            "gemini" => Self::Gemini,
            "groq" => Self::Groq,
            "mistral" => Self::Mistral,
            "openrouter" => Self::OpenRouter,
            "xai" => Self::Xai,
            _ => Self::Other,
        }
    }

    /// Whether it is OpenAI's own service, or one that OpenAI's models run on with the same API.
    pub fn has_openai_rules(self) -> bool {
        matches!(self, Self::OpenAi | Self::Azure | Self::Bedrock)
    }

    /// The API for its requests if the configuration names none.
    pub fn default_api(self) -> OpenAiApi {
        match self.has_openai_rules() {
            true => OpenAiApi::Responses,
            false => OpenAiApi::Chat,
        }
    }

    /// Whether it also serves models of others, which it offers only on the chat API.
    pub fn has_chat_only_models(self) -> bool {
        matches!(self, Self::Azure | Self::Bedrock)
    }

    /// Whether its format `json_object` needs a prompt that mentions JSON.
    pub fn needs_json_prompt(self) -> bool {
        self.has_openai_rules() || matches!(self, Self::DeepSeek | Self::Groq | Self::Mistral)
    }

    /// Whether its chat API takes a `prompt_cache_key`.
    pub fn takes_cache_key(self) -> bool {
        self.has_openai_rules() || self == Self::Mistral
    }

    /// Whether it charges less for a prompt that begins like an earlier one.
    pub fn caches_prompts(self) -> bool {
        self != Self::Other
    }
}

#[cfg(test)]
mod tests {
    use super::OpenAiService;

    #[test]
    fn a_service_is_known_by_its_address_and_else_by_its_preset() {
        use OpenAiService::{Azure, Bedrock, DeepSeek, Mistral, OpenAi, Other, Xai};
        for (provider, host, service) in [
            ("openai", "api.openai.com", OpenAi),
            ("mine", "eu.api.openai.com", OpenAi),
            ("mine", "us.api.openai.com", OpenAi),
            ("mine", "evil-api.openai.com", Other),
            ("mine", "api.openai.com.example", Other),
            ("openai", "localhost", Other),
            ("mine", "r.openai.azure.com", Azure),
            ("mine", "r.services.ai.azure.com", Azure),
            ("azure", "localhost", Azure),
            ("mine", "bedrock-runtime.eu-west-1.amazonaws.com", Bedrock),
            ("mine", "bedrock-mantle.us-east-1.api.aws", Bedrock),
            ("mine", "s3.amazonaws.com", Other),
            ("mistral", "localhost", Mistral),
            ("mistral", "api.deepseek.com", DeepSeek),
            ("mine", "us-east-1.api.x.ai", Xai),
        ] {
            assert_eq!(
                OpenAiService::new(provider, host),
                service,
                "{provider} {host}"
            );
        }
    }
}
