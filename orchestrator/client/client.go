package client

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
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
	// workTimeout bounds the wait for an answer where something is made for it, such as a sandbox.
	workTimeout = 5 * time.Minute
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

// Address is where the API is.
func (c *Client) Address() string { return c.api.String() }

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
		MaxIdleConnsPerHost:   100,
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
	resp, err := c.send(ctx, http.MethodGet, path, query, nil, nil)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	if err := json.NewDecoder(io.LimitReader(resp.Body, answerLimit)).Decode(to); err != nil {
		return nil, fmt.Errorf("the API's answer to %s: %w", path, err)
	}
	return resp.Header, nil
}

// call has the API do something, and decodes its answer into to, unless that is nil.
func (c *Client) call(ctx context.Context, method, path string, body, to any) error {
	ctx, cancel := context.WithTimeoutCause(ctx, c.o.Timeout(workTimeout), errdefs.ErrUnavailable.WithMessage("no answer in time"))
	defer cancel()
	resp, err := c.send(ctx, method, path, nil, nil, body)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(io.LimitReader(resp.Body, answerLimit)) // all of it, for the connection to be of use again
	if err == nil && to != nil {
		err = json.Unmarshal(b, to)
	}
	if err != nil {
		return fmt.Errorf("the API's answer to %s: %w", path, err)
	}
	return nil
}

// send asks the API for something, with more headers or none. A body of nil is none. The answer, which has to be closed, is one of
// success.
func (c *Client) send(ctx context.Context, method, path string, query url.Values, header http.Header, body any) (*http.Response, error) {
	u := c.api.JoinPath(path)
	u.RawQuery = query.Encode()
	var sent io.Reader
	if body != nil {
		b, err := json.Marshal(body)
		if err != nil {
			return nil, err
		}
		sent = bytes.NewReader(b)
	}
	req, err := http.NewRequestWithContext(ctx, method, u.String(), sent)
	if err != nil {
		return nil, err
	}
	maps.Copy(req.Header, header)
	req.Header.Set("X-API-KEY", c.o.Key)
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, unreachable(ctx, "the API", c.api, err)
	}
	if resp.StatusCode/100 != 2 {
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
	told := status
	if status == http.StatusBadGateway {
		status = http.StatusServiceUnavailable
	}
	class := errhttp.ToNative(status)
	if class == nil {
		class = errdefs.ErrUnknown
	}
	return &remote{who + ": " + line, class, told}
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
	line   string
	class  error
	status int // as it was told
}

// Status is that of the answer which an error is of, 0 if it isn't of one.
func Status(err error) int {
	var r *remote
	if errors.As(err, &r) {
		return r.status
	}
	return 0
}

func (r *remote) Error() string { return r.line }
func (r *remote) Unwrap() error { return r.class }
