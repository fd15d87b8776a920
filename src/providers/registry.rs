//! Builds a client for each configured provider, and finds it by name.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

use futures_util::FutureExt;
use futures_util::future::BoxFuture;

use crate::config::{self, OpenAiApi, ProviderKind};
use crate::domain::service::Service;
use crate::fair::fair_semaphore::FairSemaphore;
use crate::providers::anthropic::Anthropic;
use crate::providers::ollama::Ollama;
use crate::providers::openai_chat::{self, OpenAiChat};
use crate::providers::openai_responses::OpenAiResponses;
use crate::providers::openai_service::OpenAiService;
use crate::providers::rate_limits::RateLimits;
use crate::providers::scripted::ScriptedProvider;
use crate::providers::setup_error::SetupError;
use crate::providers::{ChatRequest, Delta, Provider, ProviderError, Reply};

/// The providers that exist without configuration, in the order in which errors list them.
const BUILT_IN: [&str; 3] = ["anthropic", "openai", "ollama"];

/// A provider that is ready for requests.
pub struct ProviderHandle {
    pub name: String,
    pub provider: Box<dyn Provider>,
    /// Whether its models cost nothing unless a price is configured, because they run locally.
    pub is_free: bool,
    /// The service tiers that it offers besides the default.
    pub services: Vec<Service>,
    /// One permit per request, in turn by key; `None` means no limit.
    pub permits: Option<FairSemaphore>,
    pub rate_limits: RateLimits,
}

impl ProviderHandle {
    /// Calls [`Provider::complete`], and removes the request's own key from errors.
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

pub struct ProviderRegistry {
    providers: BTreeMap<String, ProviderEntry>,
    /// The providers that errors list besides the built-in ones: configured ones, and presets that are usable.
    listed_names: Vec<String>,
}

struct ProviderEntry {
    handle: Result<Arc<ProviderHandle>, ProviderUnavailable>,
    /// If only the key is missing: the client for requests that carry their own key.
    with_request_key: Option<Box<LazyProvider>>,
}

/// A client that the first request builds: most providers without a key are never used.
struct LazyProvider {
    config: config::Provider,
    handle: OnceLock<Result<Arc<ProviderHandle>, ProviderUnavailable>>,
}

/// Why a model's provider cannot take requests.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProviderUnavailable {
    #[error("unsupported provider \"{name}\": supported providers are {supported}")]
    Unsupported {
        name: String,
        /// The supported names, separated by commas.
        supported: String,
    },
    /// A preset whose address differs for each customer.
    #[error(
        "the address of provider \"{name}\" is not configured (set {env}, or base_url in [providers.{name}])"
    )]
    MissingAddress {
        name: String,
        /// The environment variable for the address.
        env: &'static str,
    },
    // The contract fixes the text before the semicolon.
    #[error(
        "API key for provider \"{name}\" is not configured (set {env} or add to config.toml); in config/axed.toml it is api_key \
         in [providers.{name}]"
    )]
    MissingKey {
        name: String,
        /// The environment variable for the key.
        env: String,
    },
    /// The configuration is invalid: found only now because a provider without a key is not built at the start. Or the
    /// environment has an unusable proxy.
    #[error(transparent)]
    Misconfigured(#[from] RegistryError),
}

/// Why a configured provider cannot be built.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("[providers.{name}]: {reason}")]
pub struct RegistryError {
    pub name: String,
    pub reason: SetupError,
}

impl ProviderRegistry {
    /// Builds a client for each provider. A missing key or address is not an error until the provider is used.
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
                (None, false) => match build_handle(name, config) {
                    // The environment's fault, and perhaps of a provider that no agent uses.
                    Err(error) if error.reason == SetupError::Proxy => Err(error.into()),
                    result => Ok(result?),
                },
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

    /// Returns the provider for a request. If `has_key` is set, the request carries its own key, so a provider without a
    /// configured key is usable too.
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

    /// Every client that was built, by the provider's name: with the configured key, and for keys of requests.
    pub fn clients(&self) -> impl Iterator<Item = (&str, &ProviderHandle)> {
        self.providers.iter().flat_map(|(name, entry)| {
            let lazy = entry.with_request_key.as_ref();
            let built = lazy.and_then(|lazy| lazy.handle.get());
            let clients = [Some(&entry.handle), built].into_iter().flatten();
            clients.filter_map(|client| Some((name.as_str(), &**client.as_ref().ok()?)))
        })
    }

    /// Whether the provider exists, usable or not.
    pub fn contains(&self, name: &str) -> bool {
        self.providers.contains_key(name)
    }

    /// The names of all providers, usable or not.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.providers.keys().map(String::as_str)
    }

    /// The names that errors list, separated by commas.
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
    Ok(Arc::new(ProviderHandle {
        name,
        provider,
        is_free: config.kind.is_free(),
        services: config.services.clone(),
        permits: permits.map(|max| FairSemaphore::new(max, &[])),
        rate_limits: RateLimits::new(config),
    }))
}

fn build_provider(name: &str, config: &config::Provider) -> Result<Box<dyn Provider>, SetupError> {
    // Echoes of one service must not go to another on the same wire: only the service itself accepts its signatures.
    let service_id = |wire: &str| match name == wire {
        true => wire.to_owned(),
        false => format!("{wire}/{name}"),
    };
    Ok(match config.kind {
        ProviderKind::Anthropic => Box::new(Anthropic::new(service_id("anthropic"), config)?),
        ProviderKind::Openai => {
            let base = openai_chat::base_url(config)?;
            let service = OpenAiService::new(name, base.host());
            let chat = OpenAiChat::new(service_id("openai"), service, config)?;
            match config.api.unwrap_or(service.default_api()) {
                OpenAiApi::Chat => Box::new(chat),
                OpenAiApi::Responses => {
                    let id = format!("responses/{name}");
                    let responses = OpenAiResponses::new(id, &base, chat)?;
                    Box::new(match config.api {
                        None if service.has_chat_only_models() => responses.for_openai_models(),
                        _ => responses,
                    })
                }
            }
        }
        ProviderKind::Ollama => Box::new(Ollama::new(service_id("ollama"), config)?),
        ProviderKind::Scripted => Box::new(ScriptedProvider::load(name, &config.scripts)?),
    })
}

/// Whether the configuration lacks a key. Local servers need none, and a configured header may carry it.
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
