package client

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errhttp"
)

const (
	// dialTimeout bounds connecting, and answerTimeout the wait for an answer's beginning, where nothing is made for it.
	dialTimeout   = 10 * time.Second
	answerTimeout = time.Minute
	// answerLimit bounds what is read of an answer, in bytes.
	answerLimit = 64 << 20
	// errorLimit bounds what is read of an error, and lineLimit what is shown of one.
	errorLimit = 64 << 10
	lineLimit  = 500
)

// Client asks the API.
type Client struct {
	o        Options
	api      *url.URL
	proxy    *url.URL // nil: by host names
	http     *http.Client
	upgrades *http.Client // HTTP/1.1 alone
}

// New makes a client; nothing is sent yet. Without a key it is errdefs.ErrUnauthenticated.
func New(o Options) (*Client, error) {
	c := &Client{o: o}
	if c.o.Timeout == nil {
		c.o.Timeout = func(d time.Duration) time.Duration { return d }
	}
	if o.Key == "" {
		return nil, errdefs.ErrUnauthenticated.WithMessage(fmt.Sprintf("there is no key: set %s to what `cube key create` has printed", EnvKey))
	}
	var err error
	if c.api, err = o.parse(EnvAPI, o.API); err != nil {
		return nil, err
	}
	if o.Sandbox != "" {
		if c.proxy, err = o.parse(EnvSandbox, o.Sandbox); err != nil {
			return nil, err
		}
	}
	roots, err := o.roots()
	if err != nil {
		return nil, err
	}
	c.http, c.upgrades = c.newHTTP(roots, true), c.newHTTP(roots, false)
	return c, nil
}

// Close ends connections that are idle.
func (c *Client) Close() {
	c.http.CloseIdleConnections()
	c.upgrades.CloseIdleConnections()
}

func (c *Client) newHTTP(roots *x509.CertPool, http2 bool) *http.Client {
	t := &http.Transport{
		Proxy:                 http.ProxyFromEnvironment,
		DialContext:           c.dial,
		TLSClientConfig:       &tls.Config{RootCAs: roots},
		TLSHandshakeTimeout:   c.o.Timeout(dialTimeout),
		Protocols:             new(http.Protocols),
		HTTP2:                 &http.HTTP2Config{SendPingTimeout: 30 * time.Second, PingTimeout: 15 * time.Second},
		MaxIdleConnsPerHost:   16,
		IdleConnTimeout:       90 * time.Second,
		DisableCompression:    true,
		ExpectContinueTimeout: time.Second,
	}
	t.Protocols.SetHTTP1(true)
	t.Protocols.SetHTTP2(http2)
	// A redirection would take the key to wherever it says.
	return &http.Client{Transport: t, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
}

// dial connects. Names below localhost are this host's, whether or not a resolver knows that.
func (c *Client) dial(ctx context.Context, network, address string) (net.Conn, error) {
	if host, port, err := net.SplitHostPort(address); err == nil && strings.HasSuffix(strings.ToLower(host), ".localhost") {
		address = net.JoinHostPort("127.0.0.1", port)
	}
	d := net.Dialer{Timeout: c.o.Timeout(dialTimeout), KeepAlive: 15 * time.Second}
	return d.DialContext(ctx, network, address)
}

// get asks the API for something and decodes it into to.
func (c *Client) get(ctx context.Context, path string, query url.Values, to any) (http.Header, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, c.o.Timeout(answerTimeout), errdefs.ErrUnavailable.WithMessage("no answer in time"))
	defer cancel()
	resp, err := c.ask(ctx, path, query, http.Header{})
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	if err := json.NewDecoder(io.LimitReader(resp.Body, answerLimit)).Decode(to); err != nil {
		return nil, fmt.Errorf("the API's answer to %s: %w", path, err)
	}
	return resp.Header, nil
}

// ask sends a GET with a header of its own to the API. The answer, which has to be closed, is one of 200.
func (c *Client) ask(ctx context.Context, path string, query url.Values, header http.Header) (*http.Response, error) {
	u := *c.api
	u.Path, u.RawQuery = u.Path+path, query.Encode()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), nil)
	if err != nil {
		return nil, err
	}
	req.Header = header
	req.Header.Set("X-API-KEY", c.o.Key)
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, unreachable(ctx, "the API", c.api, err)
	}
	if resp.StatusCode != http.StatusOK {
		defer resp.Body.Close()
		return nil, refusal("the API", resp)
	}
	return resp, nil
}

// unreachable is the error of a request that got no answer.
func unreachable(ctx context.Context, who string, at *url.URL, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if u := (*url.Error)(nil); errors.As(err, &u) {
		err = u.Err // it repeats the URL
	}
	hint := ""
	var unknown x509.UnknownAuthorityError
	if errors.As(err, &unknown) {
		hint = fmt.Sprintf("; `cube ca export` on its host prints the certificate that %s may name", EnvCA)
	}
	return errdefs.ErrUnavailable.WithMessage(fmt.Sprintf("%s at %s://%s can't be reached: %v%s", who, at.Scheme, at.Host, err, hint))
}

// refusal is the error that an answer tells, of the class that its status has.
func refusal(who string, resp *http.Response) error {
	b, _ := io.ReadAll(io.LimitReader(resp.Body, errorLimit)) // what has come of it will do
	var told struct {
		Message string `json:"message"`
	}
	line := resp.Status
	if json.Unmarshal(b, &told) == nil && told.Message != "" {
		line = told.Message
	} else if resp.StatusCode/100 == 3 {
		line = "it answers with a redirection, which isn't followed with a key"
	}
	if after := resp.Header.Get("Retry-After"); after != "" {
		line += "; try again in " + after + " s"
	}
	return classed(resp.StatusCode, who, line)
}

// classed is an error of the class of a status, with a line of somebody else's.
func classed(status int, who, line string) error {
	line = strings.ToValidUTF8(line, "\uFFFD")
	if len(line) > lineLimit {
		line = strings.ToValidUTF8(line[:lineLimit], "") + "…"
	}
	line = Printable(line)
	if status == http.StatusBadGateway {
		status = http.StatusServiceUnavailable
	}
	class := errhttp.ToNative(status)
	if class == nil {
		class = errdefs.ErrUnknown
	}
	return &remote{who + ": " + line, class}
}

// Printable is a line of somebody else's that no terminal obeys.
func Printable(s string) string {
	return strings.Map(func(r rune) rune {
		if r < ' ' || r >= 0x7f && r < 0xa0 {
			return ' '
		}
		return r
	}, s)
}

// remote is an error that somebody else has told.
type remote struct {
	line  string
	class error
}

func (r *remote) Error() string { return r.line }
func (r *remote) Unwrap() error { return r.class }
