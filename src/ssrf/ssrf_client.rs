//! The HTTP client for addresses that a stranger chose: it connects to what the guard has vetted and to nothing else,
//! without proxy and without following a redirect. Knows no request.

use std::sync::Arc;
use std::time::Duration;

use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use reqwest::{Client, ClientBuilder};

use crate::ssrf::SsrfGuard;

/// How long a connection may take to come about.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// A client behind this guard, to be finished. It asks the resolver for names only: an address that stands in a URL is
/// held to [`Guard::check`] by whoever sends the request.
pub fn client_builder(guard: &Arc<SsrfGuard>) -> ClientBuilder {
    Client::builder()
        .redirect(reqwest::redirect::Policy::none())
        .no_proxy()
        .dns_resolver(Arc::new(SsrfResolver(Arc::clone(guard))))
        .connect_timeout(CONNECT_TIMEOUT)
}

/// Resolves names for the client, so that it connects to vetted addresses only.
struct SsrfResolver(Arc<SsrfGuard>);

impl Resolve for SsrfResolver {
    fn resolve(&self, name: Name) -> Resolving {
        let guard = Arc::clone(&self.0);
        Box::pin(async move {
            let addresses = guard.resolve(name.as_str()).await?;
            Ok(Box::new(addresses.into_iter()) as Addrs)
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use reqwest::dns::{Name, Resolve};

    use super::SsrfResolver;
    use crate::ssrf::SsrfGuard;

    // A name may stand for a public address when it is looked at and for another one a moment later. The client asks
    // this resolver when it connects, so that there is no second look: what it is given is vetted, each time anew.
    #[tokio::test]
    async fn the_client_is_given_vetted_addresses_only() {
        let resolve = |allowed: Vec<String>| {
            let resolver = SsrfResolver(Arc::new(SsrfGuard::new(allowed, "allow_hosts")));
            let name: Name = "localhost".parse().expect("a name");
            async move { resolver.resolve(name).await.map(Iterator::count) }
        };
        assert!(resolve(Vec::new()).await.is_err());
        let count = resolve(vec!["localhost".to_owned()]).await;
        assert!(count.expect("allowed") > 0);
    }
}
