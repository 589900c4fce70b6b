// Package status says what an error is to a client: a code of Connect's, or of HTTP with the JSON that E2B's SDKs read.
package status

import (
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"net/http"
	"os"
	"syscall"

	"connectrpc.com/connect"
	"github.com/containerd/errdefs"
)

// table is what errors are, the first that fits. Those of this program come before the kernel's.
var table = []struct {
	is   []error
	code connect.Code
	http int
}{
	{[]error{errdefs.ErrUnauthenticated}, connect.CodeUnauthenticated, http.StatusUnauthorized},
	{[]error{errdefs.ErrInvalidArgument}, connect.CodeInvalidArgument, http.StatusBadRequest},
	{[]error{errdefs.ErrNotFound}, connect.CodeNotFound, http.StatusNotFound},
	{[]error{errdefs.ErrAlreadyExists}, connect.CodeAlreadyExists, http.StatusConflict},
	{[]error{errdefs.ErrFailedPrecondition}, connect.CodeFailedPrecondition, http.StatusConflict},
	{[]error{errdefs.ErrResourceExhausted}, connect.CodeResourceExhausted, http.StatusTooManyRequests},
	{[]error{errdefs.ErrDataLoss}, connect.CodeDataLoss, http.StatusInternalServerError},
	{[]error{errdefs.ErrNotImplemented}, connect.CodeUnimplemented, http.StatusNotImplemented},
	{[]error{context.DeadlineExceeded, os.ErrDeadlineExceeded}, connect.CodeDeadlineExceeded, http.StatusRequestTimeout},
	{[]error{context.Canceled}, connect.CodeCanceled, http.StatusRequestTimeout},
	{[]error{syscall.ENOSPC, syscall.EDQUOT}, connect.CodeResourceExhausted, http.StatusInsufficientStorage},
	{[]error{syscall.ENOTDIR, syscall.EISDIR, syscall.ENAMETOOLONG, syscall.EINVAL, syscall.ENOTEMPTY, syscall.ENXIO},
		connect.CodeInvalidArgument, http.StatusBadRequest},
	{[]error{syscall.ELOOP, syscall.EROFS, syscall.ETXTBSY, syscall.EBUSY}, connect.CodeFailedPrecondition, http.StatusBadRequest},
	{[]error{fs.ErrNotExist}, connect.CodeNotFound, http.StatusNotFound},
	{[]error{fs.ErrExist}, connect.CodeAlreadyExists, http.StatusConflict},
	{[]error{fs.ErrPermission}, connect.CodePermissionDenied, http.StatusForbidden},
}

func find(err error) (connect.Code, int) {
	for _, row := range table {
		for _, is := range row.is {
			if errors.Is(err, is) {
				return row.code, row.http
			}
		}
	}
	return connect.CodeInternal, http.StatusInternalServerError
}

// Connect gives the error a code, unless it has one.
func Connect(err error) error {
	if err == nil {
		return nil
	}
	if e := (*connect.Error)(nil); errors.As(err, &e) {
		return err
	}
	code, _ := find(err)
	return connect.NewError(code, err)
}

// Write answers with the error.
func Write(w http.ResponseWriter, err error) {
	_, code := find(err)
	WriteCode(w, code, err.Error())
}

// WriteCode answers with a code and a message.
func WriteCode(w http.ResponseWriter, code int, message string) {
	WriteJSON(w, code, struct {
		Code    int    `json:"code"`
		Message string `json:"message"`
	}{code, message})
}

// WriteJSON answers with a value that always has a JSON form.
func WriteJSON(w http.ResponseWriter, code int, v any) {
	b, err := json.Marshal(v)
	if err != nil {
		code, b = http.StatusInternalServerError, []byte(`{"code":500,"message":"the answer has no JSON form"}`)
	}
	w.Header().Set("Content-Type", "application/json; charset=utf-8")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(code)
	_, _ = w.Write(append(b, '\n'))
}
