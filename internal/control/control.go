// Package control is how the daemon of a stack is asked for something by its control socket, and answers: JSON by HTTP, or a
// line that says why not.
package control

import (
	"bytes"
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

const (
	// answerLimit bounds what is read of an answer, in bytes.
	answerLimit = 16 << 20
	// bodyLimit bounds what is read of a request's body.
	bodyLimit = 64 << 10
)

// Ask asks the daemon behind a socket and decodes its answer into to, unless that is nil. Errors are of the classes of
// errdefs that the daemon's were; errdefs.ErrUnavailable if no daemon answers.
func Ask(ctx context.Context, socket, method, path string, query url.Values, to any) error {
	return ask(ctx, socket, method, url.URL{Path: path, RawQuery: query.Encode()}, nil, to)
}

// Send is Ask with a body, as JSON.
func Send(ctx context.Context, socket, method, path string, body, to any) error {
	b, err := json.Marshal(body)
	if err != nil {
		return err
	}
	return ask(ctx, socket, method, url.URL{Path: path}, bytes.NewReader(b), to)
}

// Follow sends a body, as JSON, and calls each with the values that the daemon answers with, one after the other, until it has told the
// last.
func Follow(ctx context.Context, socket, path string, body any, each func(json.RawMessage) error) error {
	b, err := json.Marshal(body)
	if err != nil {
		return err
	}
	return request(ctx, socket, http.MethodPost, url.URL{Path: path}, bytes.NewReader(b), func(answer io.Reader) error { return follow(answer, each) })
}

func ask(ctx context.Context, socket, method string, u url.URL, body io.Reader, to any) error {
	return request(ctx, socket, method, u, body, func(answer io.Reader) error {
		if to == nil {
			return nil
		}
		if err := json.NewDecoder(answer).Decode(to); err != nil {
			return fmt.Errorf("read the daemon's answer: %w", err)
		}
		return nil
	})
}

func request(ctx context.Context, socket, method string, u url.URL, body io.Reader, read func(answer io.Reader) error) error {
	t := &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "unix", socket)
		},
		DisableKeepAlives: true,
	}
	u.Scheme, u.Host = "http", "cube"
	req, err := http.NewRequestWithContext(ctx, method, u.String(), body)
	if err != nil {
		return err
	}
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	resp, err := (&http.Client{Transport: t}).Do(req)
	switch {
	case errors.Is(err, unix.ECONNREFUSED) || errors.Is(err, fs.ErrNotExist):
		return errdefs.ErrUnavailable.WithMessage("no daemon runs; start the stack: cube up")
	case ctx.Err() != nil:
		return ctx.Err()
	case err != nil:
		if u := (*url.Error)(nil); errors.As(err, &u) {
			err = u.Err // the request is the caller's to name
		}
		return errdefs.ErrUnavailable.WithMessage(fmt.Sprintf("the daemon at %s doesn't answer: %v", socket, err))
	}
	defer resp.Body.Close()
	answer := io.LimitReader(resp.Body, answerLimit)
	if resp.StatusCode != http.StatusOK {
		why, _ := io.ReadAll(answer) // what has come of it will do
		return &failure{strings.TrimSpace(string(why)), errhttp.ToNative(resp.StatusCode)}
	}
	if err := read(answer); ctx.Err() != nil {
		return ctx.Err()
	} else {
		return err
	}
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
		http.Error(w, err.Error(), status(err))
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(v) // the client has gone away
}

// status is errhttp.ToHTTP, but for classes that it takes for failures of the daemon.
func status(err error) int {
	switch {
	case errdefs.IsAlreadyExists(err), errdefs.IsAborted(err):
		return http.StatusConflict
	case errdefs.IsOutOfRange(err):
		return http.StatusBadRequest
	case errdefs.IsDeadlineExceeded(err):
		return http.StatusGatewayTimeout
	case errdefs.IsCanceled(err):
		return http.StatusServiceUnavailable
	}
	return errhttp.ToHTTP(err)
}

// Body decodes a request's body, which must be one JSON value without anything that isn't known, or nothing, which leaves to as
// it is. The error is errdefs.ErrInvalidArgument.
func Body(w http.ResponseWriter, r *http.Request, to any) error {
	d := json.NewDecoder(http.MaxBytesReader(w, r.Body, bodyLimit))
	d.DisallowUnknownFields()
	err := d.Decode(to)
	if err == io.EOF {
		return nil
	}
	if err == nil {
		if _, end := d.Token(); end != io.EOF {
			err = errors.New("there is more than one value")
		}
	}
	if err != nil {
		return errdefs.ErrInvalidArgument.WithMessage("the request's body: " + err.Error())
	}
	return nil
}
