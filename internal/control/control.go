// Package control is how the daemon of a stack is asked for something by its control socket, and answers: JSON by HTTP, or a
// line that says why not.
package control

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errhttp"
	"golang.org/x/sys/unix"
)

// answerLimit bounds what is read of an answer, in bytes.
const answerLimit = 16 << 20

// Ask asks the daemon behind a socket and decodes its answer into to, unless that is nil. Errors are of the classes of
// errdefs that the daemon's were; errdefs.ErrUnavailable if no daemon answers.
func Ask(ctx context.Context, socket, method, path string, query url.Values, to any) error {
	t := &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "unix", socket)
		},
		DisableKeepAlives: true,
	}
	u := url.URL{Scheme: "http", Host: "cube", Path: path, RawQuery: query.Encode()}
	req, err := http.NewRequestWithContext(ctx, method, u.String(), nil)
	if err != nil {
		return err
	}
	resp, err := (&http.Client{Transport: t}).Do(req)
	switch {
	case errors.Is(err, unix.ECONNREFUSED) || errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("no daemon runs; start the stack: cube up: %w", errdefs.ErrUnavailable)
	case err != nil:
		return fmt.Errorf("the daemon at %s doesn't answer: %w: %w", socket, err, errdefs.ErrUnavailable)
	}
	defer resp.Body.Close()
	body := io.LimitReader(resp.Body, answerLimit)
	if resp.StatusCode != http.StatusOK {
		why, _ := io.ReadAll(body) // what has come of it will do
		return &failure{strings.TrimSpace(string(why)), errhttp.ToNative(resp.StatusCode)}
	}
	if to == nil {
		return nil
	}
	if err := json.NewDecoder(body).Decode(to); err != nil {
		return fmt.Errorf("read the daemon's answer: %w", err)
	}
	return nil
}

// failure is the daemon's line, which names its class already.
type failure struct {
	line  string
	class error
}

func (f *failure) Error() string { return f.line }
func (f *failure) Unwrap() error { return f.class }

// Answer answers a request that was done, or failed.
func Answer(w http.ResponseWriter, v any, err error) {
	if err != nil {
		http.Error(w, err.Error(), errhttp.ToHTTP(err))
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(v) // the client has gone away
}
