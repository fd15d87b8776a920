//! Which providers there are: builds a client for each configured one, and finds it by name.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

use futures_util::FutureExt;
use futures_util::future::BoxFuture;

use tokio::sync::Semaphore;

use crate::config::{self, OpenAiApi, ProviderKind};
use crate::domain::service::Service;
use crate::providers::anthropic::Anthropic;
use crate::providers::ollama::Ollama;
use crate::providers::openai_chat::{self, OpenAiChat};
use crate::providers::openai_responses::OpenAiResponses;
use crate::providers::scripted::ScriptedProvider;
use crate::providers::{ChatRequest, Delta, Provider, ProviderError, Reply};

/// The providers that exist without being configured, in the order in which they are told.
const BUILT_IN: [&str; 3] = ["anthropic", "openai", "ollama"];

/// A provider ready to be asked.
pub struct ProviderHandle {
    /// Its configured name.
    pub name: String,
    /// The client.
    pub provider: Box<dyn Provider>,
    /// Whether its models cost nothing unless a price is configured: they run here.
    pub is_free: bool,
    /// The tiers that it sells beside the usual one.
    pub services: Vec<Service>,
    /// Held around one request; none means no limit.
    pub permits: Option<Arc<Semaphore>>,
}

impl ProviderHandle {
    /// Sends one request, as [`Provider::complete`] does. No error repeats the request's own key.
    pub fn complete<'a>(
        &'a self,
        request: ChatRequest<'a>,
        deltas: &'a mut (dyn FnMut(Delta<'_>) + Send),
    ) -> BoxFuture<'a, Result<Reply, ProviderError>> {
        let future = self.provider.complete(request, deltas);
        match request.api_key {
            None => future,
            Some(key) => future
                .map(|reply| reply.map_err(|error| error.redact(key)))
                .boxed(),
        }
    }
}

/// All configured providers.
pub struct ProviderRegistry {
    providers: BTreeMap<String, ProviderEntry>,
    /// Those that errors name beside the built-in ones: configured ones, and well-known services that can be asked.
    listed_names: Vec<String>,
}

/// A configured provider.
struct ProviderEntry {
    handle: Result<Arc<ProviderHandle>, ProviderUnavailable>,
    /// Of one that lacks nothing but a key: its client for requests that come with a key of their own.
    with_request_key: Option<Box<LazyProvider>>,
}

/// A client that is built for the first request that needs it: most of the providers without a key are never used.
struct LazyProvider {
    config: config::Provider,
    handle: OnceLock<Result<Arc<ProviderHandle>, ProviderUnavailable>>,
}

/// Why a model's provider cannot be asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProviderUnavailable {
    /// No such provider.
    #[error("unsupported provider \"{name}\": supported providers are {supported}")]
    Unsupported {
        /// What was asked for.
        name: String,
        /// What there is, parted by commas.
        supported: String,
    },
    /// A well-known service whose address is a customer's own.
    #[error(
        "the address of provider \"{name}\" is not configured (set {env}, or base_url in [providers.{name}])"
    )]
    MissingAddress {
        /// Its name.
        name: String,
        /// The variable that would hold it.
        env: &'static str,
    },
    /// It needs a key.
    #[error("API key for provider \"{name}\" is not configured (set {env} or add to config.toml)")]
    MissingKey {
        /// Its name.
        name: String,
        /// The variable that would hold the key.
        env: String,
    },
    /// Its configuration is wrong, which nobody noticed as it had no key.
    #[error(transparent)]
    Misconfigured(#[from] RegistryError),
}

/// Why a configured provider cannot be built.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("[providers.{name}]: {reason}")]
pub struct RegistryError {
    /// Its name.
    pub name: String,
    /// What is wrong, and what to do.
    pub reason: String,
}

impl ProviderRegistry {
    /// Builds a client for each. One that lacks its key is kept as that answer: agents that do not use it must run.
    pub fn build(providers: &BTreeMap<String, config::Provider>) -> Result<Self, RegistryError> {
        let (mut entries, mut listed_names) = (BTreeMap::new(), Vec::new());
        for (name, config) in providers {
            let handle = match (config.missing_address, needs_key(config)) {
                (Some(env), _) => Err(ProviderUnavailable::MissingAddress {
                    name: name.clone(),
                    env,
                }),
                (None, true) => Err(ProviderUnavailable::MissingKey {
                    name: name.clone(),
                    env: config.key_env.clone(),
                }),
                (None, false) => Ok(build_handle(name, config)?),
            };
            let is_listed = !config.is_preset || handle.is_ok();
            if is_listed && !BUILT_IN.contains(&name.as_str()) {
                listed_names.push(name.clone());
            }
            let lacks_key = matches!(handle, Err(ProviderUnavailable::MissingKey { .. }));
            let with_request_key = lacks_key.then(|| {
                Box::new(LazyProvider {
                    config: config.clone(),
                    handle: OnceLock::new(),
                })
            });
            entries.insert(
                name.clone(),
                ProviderEntry {
                    handle,
                    with_request_key,
                },
            );
        }
        Ok(Self {
            providers: entries,
            listed_names,
        })
    }

    /// The provider of that name.
    pub fn get(&self, name: &str) -> Result<&Arc<ProviderHandle>, ProviderUnavailable> {
        match self.providers.get(name) {
            Some(configured) => configured
                .handle
                .as_ref()
                .map_err(ProviderUnavailable::clone),
            None => Err(ProviderUnavailable::Unsupported {
                name: name.to_owned(),
                supported: self.supported_names(),
            }),
        }
    }

    /// The provider of that name for requests that have a key of their own, where `has_key` says so: one without a key
    /// of the operator's can then be asked too.
    pub fn get_with_key(
        &self,
        name: &str,
        has_key: bool,
    ) -> Result<&Arc<ProviderHandle>, ProviderUnavailable> {
        let configured = self.providers.get(name).filter(|_| has_key);
        let Some((name, lazy)) =
            configured.and_then(|it| Some((name, it.with_request_key.as_ref()?)))
        else {
            return self.get(name);
        };
        let handle = lazy
            .handle
            .get_or_init(|| Ok(build_handle(name, &lazy.config)?));
        handle.as_ref().map_err(ProviderUnavailable::clone)
    }

    /// Whether there is a provider of that name, usable or not.
    pub fn contains(&self, name: &str) -> bool {
        self.providers.contains_key(name)
    }

    /// The providers that errors name.
    pub fn supported_names(&self) -> String {
        BUILT_IN
            .into_iter()
            .chain(self.listed_names.iter().map(String::as_str))
            .collect::<Vec<_>>()
            .join(", ")
    }
}

fn build_handle(
    name: &str,
    config: &config::Provider,
) -> Result<Arc<ProviderHandle>, RegistryError> {
    let name = name.to_owned();
    let provider = match build_provider(&name, config) {
        Ok(provider) => provider,
        Err(reason) => return Err(RegistryError { name, reason }),
    };
    let permits = config.max_concurrent.filter(|max| *max > 0);
    let semaphore = |max: usize| Arc::new(Semaphore::new(max.min(Semaphore::MAX_PERMITS)));
    Ok(Arc::new(ProviderHandle {
        name,
        provider,
        is_free: matches!(config.kind, ProviderKind::Ollama | ProviderKind::Scripted),
        services: config.services.clone(),
        permits: permits.map(semaphore),
    }))
}

fn build_provider(name: &str, config: &config::Provider) -> Result<Box<dyn Provider>, String> {
    // What one service sent is not for another, though both speak one wire: signatures are the service's own.
    let service_id = |wire: &str| match name == wire {
        true => wire.to_owned(),
        false => format!("{wire}/{name}"),
    };
    Ok(match config.kind {
        ProviderKind::Anthropic => Box::new(Anthropic::new(service_id("anthropic"), config)?),
        ProviderKind::Openai => {
            let chat = OpenAiChat::new(service_id("openai"), config)?;
            match openai_chat::base_url_and_api(config)? {
                (_, OpenAiApi::Chat) => Box::new(chat),
                (base, OpenAiApi::Responses) => Box::new(OpenAiResponses::new(
                    format!("responses/{name}"),
                    &base,
                    chat,
                )),
            }
        }
        ProviderKind::Ollama => Box::new(Ollama::new(service_id("ollama"), config)?),
        ProviderKind::Scripted => Box::new(ScriptedProvider::load(name, &config.scripts)?),
    })
}

/// Whether a request could not be sent for want of a key. Local servers need none, and a configured header may be one.
fn needs_key(config: &config::Provider) -> bool {
    let has_header = |name: &str| config.headers.keys().any(|h| h.eq_ignore_ascii_case(name));
    let requires_key = match config.kind {
        ProviderKind::Anthropic => true,
        ProviderKind::Openai => config.base_url.is_none() || config.is_preset,
        ProviderKind::Ollama | ProviderKind::Scripted => false,
    };
    requires_key
        && config.api_key.is_none()
        && !has_header("authorization")
        && !has_header("x-api-key")
}
