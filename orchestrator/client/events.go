package client

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/url"
	"strings"
	"time"

	"github.com/containerd/errdefs"
)

const (
	// silence is after which a stream of events is taken for dead: several times what the API lets pass.
	silence = time.Minute
	// eventLimit bounds an event, in bytes.
	eventLimit = 32 << 20
)

// listen calls each with the events of a stream of the API's, until it says that it has told all, ctx ends, or each fails. A stream
// that breaks off is errdefs.ErrUnavailable.
func (c *Client) listen(ctx context.Context, path string, query url.Values, each func(name string, data []byte) error) error {
	broke := errdefs.ErrUnavailable.WithMessage("the API has fallen silent")
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	alive := time.AfterFunc(c.o.Timeout(silence), func() { cancel(broke) })
	defer alive.Stop()
	resp, err := c.ask(ctx, path, query)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	lines := bufio.NewScanner(resp.Body)
	lines.Buffer(nil, eventLimit)
	var name string
	for lines.Scan() {
		alive.Reset(c.o.Timeout(silence))
		line := lines.Text()
		if n, ok := strings.CutPrefix(line, "event: "); ok {
			name = n
			continue
		}
		data, ok := strings.CutPrefix(line, "data: ")
		if !ok {
			continue
		}
		switch name {
		case "end":
			return nil
		case "error":
			return told(data)
		}
		if err := each(name, []byte(data)); err != nil {
			return err
		}
	}
	err = lines.Err()
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case errors.Is(err, bufio.ErrTooLong):
		return fmt.Errorf("an event of the API's has more than %d bytes", eventLimit)
	case err == nil:
		err = io.ErrUnexpectedEOF
	}
	return errdefs.ErrUnavailable.WithMessage(fmt.Sprintf("the API's stream of events has broken off: %v", err))
}

// told is the error that the API ends a stream with.
func told(data string) error {
	var e struct {
		Code    int    `json:"code"`
		Message string `json:"message"`
	}
	if err := json.Unmarshal([]byte(data), &e); err != nil {
		return fmt.Errorf("an event of the API's: %w", err)
	}
	return classed(e.Code, "the API", e.Message)
}
