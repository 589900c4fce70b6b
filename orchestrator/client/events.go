package client

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/containerd/errdefs"
)

const (
	// silence is after which a stream is taken for dead: several times what the API lets pass.
	silence = time.Minute
	// lineMost bounds a line of one, in bytes.
	lineMost = 32 << 20
)

// listen calls each with the events of a stream of the API's, until it says that it has told all, ctx ends, or each fails. A stream
// that breaks off is errdefs.ErrUnavailable.
func (c *Client) listen(ctx context.Context, path string, query url.Values, each func(name string, data []byte) error) error {
	var name string
	return c.follow(ctx, http.MethodGet, path, query, nil, func(line string) (last bool, err error) {
		if n, ok := strings.CutPrefix(line, "event: "); ok {
			name = n
			return false, nil
		}
		data, ok := strings.CutPrefix(line, "data: ")
		switch {
		case !ok:
			return false, nil
		case name == "end":
			return true, nil
		case name == "error":
			return true, told(data)
		}
		return false, each(name, []byte(data))
	})
}

// follow calls each with the lines of an answer that goes on, until each says that it was the last, or fails, or ctx ends. An answer
// that breaks off is errdefs.ErrUnavailable.
func (c *Client) follow(ctx context.Context, method, path string, query url.Values, body any, each func(line string) (last bool, err error)) error {
	broke := errdefs.ErrUnavailable.WithMessage("the API has fallen silent")
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	alive := time.AfterFunc(c.o.Timeout(silence), func() { cancel(broke) })
	defer alive.Stop()
	resp, err := c.send(ctx, method, path, query, body)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	lines := bufio.NewScanner(resp.Body)
	lines.Buffer(nil, lineMost)
	for lines.Scan() {
		alive.Reset(c.o.Timeout(silence))
		if last, err := each(lines.Text()); last || err != nil {
			return err
		}
	}
	err = lines.Err()
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case errors.Is(err, bufio.ErrTooLong):
		return fmt.Errorf("a line of the API's has more than %d bytes", lineMost)
	case err == nil:
		err = io.ErrUnexpectedEOF
	}
	return errdefs.ErrUnavailable.WithMessage(fmt.Sprintf("what the API tells has broken off: %v", err))
}

// told is the error that the API ends a stream with.
func told(data string) error {
	var e struct {
		Code    int    `json:"code"`
		Message string `json:"message"`
	}
	if err := json.Unmarshal([]byte(data), &e); err != nil {
		return fmt.Errorf("the end that the API tells: %w", err)
	}
	return classed(e.Code, "the API", e.Message)
}
