package client

import (
	"cmp"
	"crypto/x509"
	"fmt"
	"net/netip"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/containerd/errdefs"
)

// Variables of the environment. Those of E2B's SDKs are taken where ours aren't set.
const (
	EnvAPI       = "CUBE_API_URL"
	EnvKey       = "CUBE_API_KEY"
	EnvSandbox   = "CUBE_SANDBOX_URL"
	EnvCA        = "CUBE_CA_FILE"
	EnvAllowHTTP = "CUBE_ALLOW_HTTP"

	envE2BAPI     = "E2B_API_URL"
	envE2BKey     = "E2B_API_KEY"
	envE2BSandbox = "E2B_SANDBOX_URL"
	envE2BDomain  = "E2B_DOMAIN"
)

// defaultAPI is where `cube up` serves unless told otherwise.
const defaultAPI = "http://127.0.0.1:3000"

// Options say where sandboxes are and who asks for them.
type Options struct {
	// API is the base URL of the API, Key a key of it.
	API, Key string
	// Sandbox is the base URL of the proxy, which is told the sandbox by headers then; "" reaches sandboxes by host names below
	// the domain that the API names, with TLS.
	Sandbox string
	// CA is a file with certificates of authorities to trust beside the system's; "" is none.
	CA string
	// AllowHTTP has the key and tokens sent in the clear to other machines.
	AllowHTTP bool
	// Timeout scales a deadline for this host; nil leaves it.
	Timeout func(time.Duration) time.Duration
}

// FromEnv reads what the environment says.
func FromEnv() Options {
	o := Options{
		API:       cmp.Or(os.Getenv(EnvAPI), os.Getenv(envE2BAPI)),
		Key:       cmp.Or(os.Getenv(EnvKey), os.Getenv(envE2BKey)),
		Sandbox:   cmp.Or(os.Getenv(EnvSandbox), os.Getenv(envE2BSandbox)),
		CA:        os.Getenv(EnvCA),
		AllowHTTP: os.Getenv(EnvAllowHTTP) == "1",
	}
	if domain := os.Getenv(envE2BDomain); o.API == "" && domain != "" {
		o.API = "https://api." + domain
	}
	o.API = cmp.Or(o.API, defaultAPI)
	return o
}

// parse reads a base URL, which name is the variable of. To a host that isn't this one, secrets go by TLS alone.
func (o *Options) parse(name, raw string) (*url.URL, error) {
	u, err := url.Parse(raw)
	if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" || u.User != nil || u.RawQuery != "" || u.Fragment != "" {
		return nil, errdefs.ErrInvalidArgument.WithMessage(fmt.Sprintf("%s is %q, which isn't a URL like https://api.example.com", name, redacted(raw)))
	}
	if u.Scheme == "http" && !o.AllowHTTP && !isLoopback(u.Hostname()) {
		return nil, errdefs.ErrFailedPrecondition.WithMessage(fmt.Sprintf(
			"%s is %q: the key isn't sent to another machine in the clear; use https, or set %s=1 if you trust the network", name, redacted(raw), EnvAllowHTTP))
	}
	u.Path = strings.TrimSuffix(u.Path, "/")
	return u, nil
}

// redacted is a URL without what may be a password.
func redacted(raw string) string {
	if scheme, rest, ok := strings.Cut(raw, "://"); ok {
		if i := strings.LastIndex(rest, "@"); i >= 0 {
			return scheme + "://…" + rest[i:]
		}
	}
	return raw
}

// isLoopback says whether a host is this one by its name (RFC 6761, 6.3) or address.
func isLoopback(host string) bool {
	host = strings.ToLower(strings.TrimSuffix(host, "."))
	if host == "localhost" || strings.HasSuffix(host, ".localhost") {
		return true
	}
	a, err := netip.ParseAddr(host)
	return err == nil && a.Unmap().IsLoopback()
}

// roots are the authorities to trust, nil for the system's, which SSL_CERT_FILE may replace.
func (o *Options) roots() (*x509.CertPool, error) {
	if o.CA == "" {
		return nil, nil
	}
	pem, err := os.ReadFile(o.CA)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", EnvCA, err)
	}
	pool, err := x509.SystemCertPool()
	if err != nil {
		pool = x509.NewCertPool()
	}
	if !pool.AppendCertsFromPEM(pem) {
		return nil, errdefs.ErrInvalidArgument.WithMessage(fmt.Sprintf("%s: there is no certificate in %s; `cube ca export` prints one", EnvCA, o.CA))
	}
	return pool, nil
}
