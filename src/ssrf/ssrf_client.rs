//! The HTTP client for untrusted URLs. It connects only to addresses that the guard has vetted, uses no proxy and
//! follows no redirect.

use std::sync::Arc;
use std::time::Duration;

use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use reqwest::{Client, ClientBuilder};

use crate::ssrf::SsrfGuard;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// A client builder behind this guard. The client calls the resolver only for names, so the sender must check IP
/// addresses in URLs with [`SsrfGuard::check`].
pub fn client_builder(guard: &Arc<SsrfGuard>) -> ClientBuilder {
    Client::builder()
        .redirect(reqwest::redirect::Policy::none())
        .no_proxy()
        .dns_resolver(Arc::new(SsrfResolver(Arc::clone(guard))))
        .connect_timeout(CONNECT_TIMEOUT)
}

/// Resolves names to vetted addresses only.
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

    // A name may resolve to a public address when it is checked and to another one a moment later. The client calls
    // this resolver when it connects, and gets only vetted addresses each time.
    #[tokio::test]
    async fn the_client_gets_only_vetted_addresses() {
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
