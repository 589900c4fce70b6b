package ingress

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/internal/control"
)

// Client is the Routes behind a route socket. Its errors are errdefs.ErrUnavailable while nobody listens there.
type Client struct{ Socket string }

var _ Routes = (*Client)(nil)

// Lookup is of Routes.
func (c *Client) Lookup(ctx context.Context, id string) (r Route, err error) {
	err = control.Ask(ctx, c.Socket, http.MethodGet, root+"/"+id, nil, &r)
	return r, err
}

// Wake is of Routes.
func (c *Client) Wake(ctx context.Context, id string) (r Route, err error) {
	err = control.Ask(ctx, c.Socket, http.MethodPost, root+"/"+id+"/wake", nil, &r)
	return r, err
}

// Watch is of Routes. It ends with the control plane's process, too.
func (c *Client) Watch(ctx context.Context, each func(Update) error) error {
	t := &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "unix", c.Socket)
		},
		DisableKeepAlives: true,
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://cube"+root, nil)
	if err != nil {
		return err
	}
	resp, err := (&http.Client{Transport: t}).Do(req)
	if err != nil {
		if u := (*url.Error)(nil); errors.As(err, &u) {
			err = u.Err // the request says nothing to the reader
		}
		return errdefs.ErrUnavailable.WithMessage(fmt.Sprintf("watch the routes: %v", err))
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return errdefs.ErrUnavailable.WithMessage("watch the routes: the control plane answers " + resp.Status)
	}
	dec := json.NewDecoder(resp.Body)
	for {
		var u Update
		if err := dec.Decode(&u); err != nil {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			if errors.Is(err, io.EOF) {
				err = errors.New("the control plane has ended it")
			}
			return errdefs.ErrUnavailable.WithMessage(fmt.Sprintf("watch the routes: %v", err))
		}
		if err := each(u); err != nil {
			return err
		}
	}
}
