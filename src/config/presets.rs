//! Well-known services that need no section in the configuration: their addresses and the variables that hold their
//! keys. All offer OpenAI's chat API.

use crate::config::environment::{Environment, env_value};

pub struct Preset {
    /// The provider's name in `provider/model`.
    pub name: &'static str,
    /// Variables that may hold its key: the first one that is set wins, and errors name the first one.
    pub key_variables: &'static [&'static str],
    base: PresetBase,
}

enum PresetBase {
    Fixed(&'static str),
    /// Prefix, variable and suffix: the variable's value goes between the two.
    FromEnv(&'static str, &'static str, &'static str),
}

impl Preset {
    /// # Errors
    /// The variable that must hold the address and is not set.
    pub fn base_url(&self, environment: &Environment) -> Result<String, &'static str> {
        match self.base {
            PresetBase::Fixed(base) => Ok(base.to_owned()),
            PresetBase::FromEnv(prefix, variable, suffix) => match env_value(environment, variable)
            {
                Some(value) => {
                    let value = value.trim().trim_end_matches('/');
                    // Azure's documentation shows the endpoint with and without the suffix.
                    let value = value.strip_suffix(suffix).unwrap_or(value);
                    Ok(format!("{prefix}{value}{suffix}"))
                }
                None => Err(variable),
            },
        }
    }
}

const fn fixed_preset(
    name: &'static str,
    key_variables: &'static [&'static str],
    base: &'static str,
) -> Preset {
    Preset {
        name,
        key_variables,
        base: PresetBase::Fixed(base),
    }
}

pub const PRESETS: [Preset; 11] = [
    fixed_preset(
        "gemini",
        &["GEMINI_API_KEY", "GOOGLE_API_KEY"],
        "https://generativelanguage.googleapis.com/v1beta/openai",
    ),
    fixed_preset(
        "openrouter",
        &["OPENROUTER_API_KEY"],
        "https://openrouter.ai/api/v1",
    ),
    fixed_preset("groq", &["GROQ_API_KEY"], "https://api.groq.com/openai/v1"),
    fixed_preset("mistral", &["MISTRAL_API_KEY"], "https://api.mistral.ai/v1"),
    fixed_preset(
        "deepseek",
        &["DEEPSEEK_API_KEY"],
        "https://api.deepseek.com/v1",
    ),
    fixed_preset("xai", &["XAI_API_KEY"], "https://api.x.ai/v1"),
    fixed_preset(
        "together",
        &["TOGETHER_API_KEY"],
        "https://api.together.xyz/v1",
    ),
    fixed_preset(
        "fireworks",
        &["FIREWORKS_API_KEY"],
        "https://api.fireworks.ai/inference/v1",
    ),
    fixed_preset(
        "cerebras",
        &["CEREBRAS_API_KEY"],
        "https://api.cerebras.ai/v1",
    ),
    // The variable holds the resource's address, such as https://my-resource.openai.azure.com. Model names are names
    // of deployments.
    Preset {
        name: "azure",
        key_variables: &["AZURE_OPENAI_API_KEY", "AZURE_API_KEY"],
        base: PresetBase::FromEnv("", "AZURE_OPENAI_ENDPOINT", "/openai/v1"),
    },
    Preset {
        name: "bedrock",
        key_variables: &["AWS_BEARER_TOKEN_BEDROCK"],
        base: PresetBase::FromEnv(
            "https://bedrock-runtime.",
            "AWS_REGION",
            ".amazonaws.com/openai/v1",
        ),
    },
];

/// Whether OpenAI itself answers there: its address, or one of its regions' (`eu.api.openai.com`).
pub fn is_openai_host(host: &str) -> bool {
    let prefix = host.strip_suffix("api.openai.com");
    prefix.is_some_and(|prefix| prefix.is_empty() || prefix.ends_with('.'))
}

pub fn find_preset(name: &str) -> Option<&'static Preset> {
    PRESETS.iter().find(|preset| preset.name == name)
}

#[cfg(test)]
mod tests {
    use super::{Environment, find_preset};

    #[test]
    fn an_endpoint_may_have_its_path() {
        let azure = find_preset("azure").expect("azure");
        for path in ["", "/", "/openai/v1", "/openai/v1/"] {
            let endpoint = format!("https://r.openai.azure.com{path}");
            let mut environment = Environment::default();
            environment.insert("AZURE_OPENAI_ENDPOINT".into(), endpoint);
            assert_eq!(
                azure.base_url(&environment),
                Ok("https://r.openai.azure.com/openai/v1".to_owned())
            );
        }
    }
}
