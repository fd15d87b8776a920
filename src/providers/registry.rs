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
use crate::providers::openai::{self, OpenAi};
use crate::providers::responses::Responses;
use crate::providers::scripted::Scripted;
use crate::providers::{ChatRequest, Delta, Provider, ProviderError, Reply};

/// The providers that exist without being configured, in the order in which they are told.
const BUILT_IN: [&str; 3] = ["anthropic", "openai", "ollama"];

/// A provider ready to be asked.
pub struct Served {
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

impl Served {
    /// Sends one request, as [`Provider::complete`] does. No error repeats the request's own key.
    pub fn complete<'a>(
        &'a self,
        request: ChatRequest<'a>,
        deltas: &'a mut (dyn FnMut(Delta<'_>) + Send),
    ) -> BoxFuture<'a, Result<Reply, ProviderError>> {
        let completed = self.provider.complete(request, deltas);
        match request.key {
            None => completed,
            Some(key) => completed
                .map(|reply| reply.map_err(|error| error.without(key)))
                .boxed(),
        }
    }
}

/// All configured providers.
pub struct Registry {
    providers: BTreeMap<String, Configured>,
    /// Those that errors name beside the built-in ones: configured ones, and well-known services that can be asked.
    named: Vec<String>,
}

/// A configured provider.
struct Configured {
    served: Result<Arc<Served>, Unavailable>,
    /// Of one that lacks nothing but a key: its client for requests that come with a key of their own.
    keyed: Option<Box<Keyed>>,
}

/// A client that is built for the first request that needs it: most of the providers without a key are never used.
struct Keyed {
    config: config::Provider,
    served: OnceLock<Result<Arc<Served>, Unavailable>>,
}

/// Why a model's provider cannot be asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unavailable {
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
    Broken(#[from] RegistryError),
}

/// Why a configured provider cannot be built.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("[providers.{name}]: {why}")]
pub struct RegistryError {
    /// Its name.
    pub name: String,
    /// What is wrong, and what to do.
    pub why: String,
}

impl Registry {
    /// Builds a client for each. One that lacks its key is kept as that answer: agents that do not use it must run.
    pub fn build(providers: &BTreeMap<String, config::Provider>) -> Result<Self, RegistryError> {
        let (mut built, mut named) = (BTreeMap::new(), Vec::new());
        for (name, config) in providers {
            let served = match (config.missing_address, needs_key(config)) {
                (Some(env), _) => Err(Unavailable::MissingAddress {
                    name: name.clone(),
                    env,
                }),
                (None, true) => Err(Unavailable::MissingKey {
                    name: name.clone(),
                    env: config.key_env.clone(),
                }),
                (None, false) => Ok(serve(name, config)?),
            };
            let is_own = !config.is_preset || served.is_ok();
            if is_own && !BUILT_IN.contains(&name.as_str()) {
                named.push(name.clone());
            }
            let lacks_key = matches!(served, Err(Unavailable::MissingKey { .. }));
            let keyed = lacks_key.then(|| {
                Box::new(Keyed {
                    config: config.clone(),
                    served: OnceLock::new(),
                })
            });
            built.insert(name.clone(), Configured { served, keyed });
        }
        Ok(Self {
            providers: built,
            named,
        })
    }

    /// The provider of that name.
    pub fn get(&self, name: &str) -> Result<&Arc<Served>, Unavailable> {
        match self.providers.get(name) {
            Some(configured) => configured.served.as_ref().map_err(Unavailable::clone),
            None => Err(Unavailable::Unsupported {
                name: name.to_owned(),
                supported: self.supported(),
            }),
        }
    }

    /// The provider of that name for requests that have a key of their own, where `has_key` says so: one without a key
    /// of the operator's can then be asked too.
    pub fn get_for(&self, name: &str, has_key: bool) -> Result<&Arc<Served>, Unavailable> {
        let configured = self.providers.get(name).filter(|_| has_key);
        let Some((name, keyed)) = configured.and_then(|it| Some((name, it.keyed.as_ref()?))) else {
            return self.get(name);
        };
        let served = keyed.served.get_or_init(|| Ok(serve(name, &keyed.config)?));
        served.as_ref().map_err(Unavailable::clone)
    }

    /// Whether there is a provider of that name, usable or not.
    pub fn is_known(&self, name: &str) -> bool {
        self.providers.contains_key(name)
    }

    /// The providers that errors name.
    pub fn supported(&self) -> String {
        BUILT_IN
            .into_iter()
            .chain(self.named.iter().map(String::as_str))
            .collect::<Vec<_>>()
            .join(", ")
    }
}

fn serve(name: &str, config: &config::Provider) -> Result<Arc<Served>, RegistryError> {
    let name = name.to_owned();
    let provider = match client(&name, config) {
        Ok(provider) => provider,
        Err(why) => return Err(RegistryError { name, why }),
    };
    let permits = config.max_concurrent.filter(|most| *most > 0);
    let semaphore = |most: usize| Arc::new(Semaphore::new(most.min(Semaphore::MAX_PERMITS)));
    Ok(Arc::new(Served {
        name,
        provider,
        is_free: matches!(config.kind, ProviderKind::Ollama | ProviderKind::Scripted),
        services: config.services.clone(),
        permits: permits.map(semaphore),
    }))
}

fn client(name: &str, config: &config::Provider) -> Result<Box<dyn Provider>, String> {
    // What one service sent is not for another, though both speak one wire: signatures are the service's own.
    let mark = |wire: &str| match name == wire {
        true => wire.to_owned(),
        false => format!("{wire}/{name}"),
    };
    Ok(match config.kind {
        ProviderKind::Anthropic => Box::new(Anthropic::new(mark("anthropic"), config)?),
        ProviderKind::Openai => {
            let chat = OpenAi::new(mark("openai"), config)?;
            match openai::address(config)? {
                (_, OpenAiApi::Chat) => Box::new(chat),
                (base, OpenAiApi::Responses) => {
                    Box::new(Responses::new(format!("responses/{name}"), &base, chat))
                }
            }
        }
        ProviderKind::Ollama => Box::new(Ollama::new(mark("ollama"), config)?),
        ProviderKind::Scripted => Box::new(Scripted::load(name, &config.scripts)?),
    })
}

/// Whether a request could not be sent for want of a key. Local servers need none, and a configured header may be one.
fn needs_key(config: &config::Provider) -> bool {
    let has_header = |name: &str| config.headers.keys().any(|h| h.eq_ignore_ascii_case(name));
    let wants_key = match config.kind {
        ProviderKind::Anthropic => true,
        ProviderKind::Openai => config.base_url.is_none() || config.is_preset,
        ProviderKind::Ollama | ProviderKind::Scripted => false,
    };
    wants_key
        && config.api_key.is_none()
        && !has_header("authorization")
        && !has_header("x-api-key")
}
