package ports

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
	"time"

	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errhttp"
	"golang.org/x/sys/unix"
)

// Path is where a Server answers, on the daemon's control socket.
const Path = "/network/ports"

// UpdateTimeout is what an Update should take at most, on a host that isn't slow.
const UpdateTimeout = 10 * time.Second

// answerLimit bounds what is read of an answer, in bytes.
const answerLimit = 1 << 20

// State is how things stand with a port.
type State struct {
	Port
	ID     string `json:"id"`               // the sandbox's
	Reason string `json:"reason,omitempty"` // why it isn't served; "": it is
}

// Update has the daemon behind a control socket look at a sandbox's ports again. When it returns, all that the sandbox has are
// served, and what it had before reaches it no more. errdefs.ErrConflict for a port that another process has,
// errdefs.ErrInvalidArgument for an address that the host hasn't, errdefs.ErrUnavailable if no daemon answers.
func Update(ctx context.Context, socket, id string) error {
	return ask(ctx, socket, http.MethodPost, id, nil)
}

// List asks the daemon for the ports of a sandbox, "" for those of all. The errors are Update's.
func List(ctx context.Context, socket, id string) (all []State, err error) {
	return all, ask(ctx, socket, http.MethodGet, id, &all)
}

func ask(ctx context.Context, socket, method, id string, to any) error {
	t := &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "unix", socket)
		},
		DisableKeepAlives: true,
	}
	req, err := http.NewRequestWithContext(ctx, method, "http://cube"+Path+"?id="+url.QueryEscape(id), nil)
	if err != nil {
		return err
	}
	resp, err := (&http.Client{Transport: t}).Do(req)
	switch {
	case errors.Is(err, unix.ECONNREFUSED) || errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("port mappings need the daemon: cube up: %w", errdefs.ErrUnavailable)
	case err != nil:
		return fmt.Errorf("ask the daemon for port mappings: %w: %w", err, errdefs.ErrUnavailable)
	}
	defer resp.Body.Close()
	body := io.LimitReader(resp.Body, answerLimit)
	if resp.StatusCode != http.StatusOK {
		why, err := io.ReadAll(body)
		if err != nil {
			return fmt.Errorf("ask the daemon for port mappings: status %s: %w: %w", resp.Status, err, errdefs.ErrUnavailable)
		}
		return fmt.Errorf("%s: %w", strings.TrimSpace(string(why)), errhttp.ToNative(resp.StatusCode))
	}
	if to == nil {
		return nil
	}
	if err := json.NewDecoder(body).Decode(to); err != nil {
		return fmt.Errorf("read the daemon's answer on port mappings: %w: %w", err, errdefs.ErrUnavailable)
	}
	return nil
}
