from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CompareType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EQUAL: _ClassVar[CompareType]
EQUAL: CompareType

class UserInformation(_message.Message):
    __slots__ = ("effective_user",)
    EFFECTIVE_USER_FIELD_NUMBER: _ClassVar[int]
    effective_user: str
    def __init__(self, effective_user: _Optional[str] = ...) -> None: ...

class ConnectionHeader(_message.Message):
    __slots__ = ("user_info", "service_name")
    USER_INFO_FIELD_NUMBER: _ClassVar[int]
    SERVICE_NAME_FIELD_NUMBER: _ClassVar[int]
    user_info: UserInformation
    service_name: str
    def __init__(self, user_info: _Optional[_Union[UserInformation, _Mapping]] = ..., service_name: _Optional[str] = ...) -> None: ...

class RequestHeader(_message.Message):
    __slots__ = ("call_id", "method_name", "request_param", "timeout")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    METHOD_NAME_FIELD_NUMBER: _ClassVar[int]
    REQUEST_PARAM_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    call_id: int
    method_name: str
    request_param: bool
    timeout: int
    def __init__(self, call_id: _Optional[int] = ..., method_name: _Optional[str] = ..., request_param: _Optional[bool] = ..., timeout: _Optional[int] = ...) -> None: ...

class ExceptionResponse(_message.Message):
    __slots__ = ("exception_class_name", "stack_trace", "do_not_retry")
    EXCEPTION_CLASS_NAME_FIELD_NUMBER: _ClassVar[int]
    STACK_TRACE_FIELD_NUMBER: _ClassVar[int]
    DO_NOT_RETRY_FIELD_NUMBER: _ClassVar[int]
    exception_class_name: str
    stack_trace: str
    do_not_retry: bool
    def __init__(self, exception_class_name: _Optional[str] = ..., stack_trace: _Optional[str] = ..., do_not_retry: _Optional[bool] = ...) -> None: ...

class ResponseHeader(_message.Message):
    __slots__ = ("call_id", "exception")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    EXCEPTION_FIELD_NUMBER: _ClassVar[int]
    call_id: int
    exception: ExceptionResponse
    def __init__(self, call_id: _Optional[int] = ..., exception: _Optional[_Union[ExceptionResponse, _Mapping]] = ...) -> None: ...

class ServerName(_message.Message):
    __slots__ = ("host_name", "port", "start_code")
    HOST_NAME_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    START_CODE_FIELD_NUMBER: _ClassVar[int]
    host_name: str
    port: int
    start_code: int
    def __init__(self, host_name: _Optional[str] = ..., port: _Optional[int] = ..., start_code: _Optional[int] = ...) -> None: ...

class ServerNode(_message.Message):
    __slots__ = ("server",)
    SERVER_FIELD_NUMBER: _ClassVar[int]
    server: ServerName
    def __init__(self, server: _Optional[_Union[ServerName, _Mapping]] = ...) -> None: ...

class TableName(_message.Message):
    __slots__ = ("namespace", "qualifier")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    QUALIFIER_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    qualifier: bytes
    def __init__(self, namespace: _Optional[bytes] = ..., qualifier: _Optional[bytes] = ...) -> None: ...

class BytesBytesPair(_message.Message):
    __slots__ = ("first", "second")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    SECOND_FIELD_NUMBER: _ClassVar[int]
    first: bytes
    second: bytes
    def __init__(self, first: _Optional[bytes] = ..., second: _Optional[bytes] = ...) -> None: ...

class NameBytesPair(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: bytes
    def __init__(self, name: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...

class ColumnFamilySchema(_message.Message):
    __slots__ = ("name", "attributes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ATTRIBUTES_FIELD_NUMBER: _ClassVar[int]
    name: bytes
    attributes: _containers.RepeatedCompositeFieldContainer[BytesBytesPair]
    def __init__(self, name: _Optional[bytes] = ..., attributes: _Optional[_Iterable[_Union[BytesBytesPair, _Mapping]]] = ...) -> None: ...

class TableSchema(_message.Message):
    __slots__ = ("table_name", "column_families")
    TABLE_NAME_FIELD_NUMBER: _ClassVar[int]
    COLUMN_FAMILIES_FIELD_NUMBER: _ClassVar[int]
    table_name: TableName
    column_families: _containers.RepeatedCompositeFieldContainer[ColumnFamilySchema]
    def __init__(self, table_name: _Optional[_Union[TableName, _Mapping]] = ..., column_families: _Optional[_Iterable[_Union[ColumnFamilySchema, _Mapping]]] = ...) -> None: ...

class RegionInfo(_message.Message):
    __slots__ = ("region_id", "table_name", "start_key", "end_key", "offline", "split")
    REGION_ID_FIELD_NUMBER: _ClassVar[int]
    TABLE_NAME_FIELD_NUMBER: _ClassVar[int]
    START_KEY_FIELD_NUMBER: _ClassVar[int]
    END_KEY_FIELD_NUMBER: _ClassVar[int]
    OFFLINE_FIELD_NUMBER: _ClassVar[int]
    SPLIT_FIELD_NUMBER: _ClassVar[int]
    region_id: int
    table_name: TableName
    start_key: bytes
    end_key: bytes
    offline: bool
    split: bool
    def __init__(self, region_id: _Optional[int] = ..., table_name: _Optional[_Union[TableName, _Mapping]] = ..., start_key: _Optional[bytes] = ..., end_key: _Optional[bytes] = ..., offline: _Optional[bool] = ..., split: _Optional[bool] = ...) -> None: ...

class RegionSpecifier(_message.Message):
    __slots__ = ("type", "value")
    class RegionSpecifierType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        REGION_NAME: _ClassVar[RegionSpecifier.RegionSpecifierType]
    REGION_NAME: RegionSpecifier.RegionSpecifierType
    TYPE_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    type: RegionSpecifier.RegionSpecifierType
    value: bytes
    def __init__(self, type: _Optional[_Union[RegionSpecifier.RegionSpecifierType, str]] = ..., value: _Optional[bytes] = ...) -> None: ...

class Cell(_message.Message):
    __slots__ = ("row", "family", "qualifier", "timestamp", "cell_type", "value")
    ROW_FIELD_NUMBER: _ClassVar[int]
    FAMILY_FIELD_NUMBER: _ClassVar[int]
    QUALIFIER_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMP_FIELD_NUMBER: _ClassVar[int]
    CELL_TYPE_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    row: bytes
    family: bytes
    qualifier: bytes
    timestamp: int
    cell_type: int
    value: bytes
    def __init__(self, row: _Optional[bytes] = ..., family: _Optional[bytes] = ..., qualifier: _Optional[bytes] = ..., timestamp: _Optional[int] = ..., cell_type: _Optional[int] = ..., value: _Optional[bytes] = ...) -> None: ...

class Column(_message.Message):
    __slots__ = ("family", "qualifier")
    FAMILY_FIELD_NUMBER: _ClassVar[int]
    QUALIFIER_FIELD_NUMBER: _ClassVar[int]
    family: bytes
    qualifier: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, family: _Optional[bytes] = ..., qualifier: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Get(_message.Message):
    __slots__ = ("row",)
    ROW_FIELD_NUMBER: _ClassVar[int]
    row: bytes
    def __init__(self, row: _Optional[bytes] = ...) -> None: ...

class Result(_message.Message):
    __slots__ = ("cell",)
    CELL_FIELD_NUMBER: _ClassVar[int]
    cell: _containers.RepeatedCompositeFieldContainer[Cell]
    def __init__(self, cell: _Optional[_Iterable[_Union[Cell, _Mapping]]] = ...) -> None: ...

class Comparator(_message.Message):
    __slots__ = ("name", "serialized_comparator")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SERIALIZED_COMPARATOR_FIELD_NUMBER: _ClassVar[int]
    name: str
    serialized_comparator: bytes
    def __init__(self, name: _Optional[str] = ..., serialized_comparator: _Optional[bytes] = ...) -> None: ...

class ByteArrayComparable(_message.Message):
    __slots__ = ("value",)
    VALUE_FIELD_NUMBER: _ClassVar[int]
    value: bytes
    def __init__(self, value: _Optional[bytes] = ...) -> None: ...

class BinaryComparator(_message.Message):
    __slots__ = ("comparable",)
    COMPARABLE_FIELD_NUMBER: _ClassVar[int]
    comparable: ByteArrayComparable
    def __init__(self, comparable: _Optional[_Union[ByteArrayComparable, _Mapping]] = ...) -> None: ...

class Condition(_message.Message):
    __slots__ = ("row", "family", "qualifier", "compare_type", "comparator")
    ROW_FIELD_NUMBER: _ClassVar[int]
    FAMILY_FIELD_NUMBER: _ClassVar[int]
    QUALIFIER_FIELD_NUMBER: _ClassVar[int]
    COMPARE_TYPE_FIELD_NUMBER: _ClassVar[int]
    COMPARATOR_FIELD_NUMBER: _ClassVar[int]
    row: bytes
    family: bytes
    qualifier: bytes
    compare_type: CompareType
    comparator: Comparator
    def __init__(self, row: _Optional[bytes] = ..., family: _Optional[bytes] = ..., qualifier: _Optional[bytes] = ..., compare_type: _Optional[_Union[CompareType, str]] = ..., comparator: _Optional[_Union[Comparator, _Mapping]] = ...) -> None: ...

class MutationProto(_message.Message):
    __slots__ = ("row", "mutate_type", "column_value", "timestamp")
    class MutationType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        INCREMENT: _ClassVar[MutationProto.MutationType]
        PUT: _ClassVar[MutationProto.MutationType]
        DELETE: _ClassVar[MutationProto.MutationType]
    INCREMENT: MutationProto.MutationType
    PUT: MutationProto.MutationType
    DELETE: MutationProto.MutationType
    class DeleteType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        DELETE_FAMILY: _ClassVar[MutationProto.DeleteType]
    DELETE_FAMILY: MutationProto.DeleteType
    class ColumnValue(_message.Message):
        __slots__ = ("family", "qualifier_value")
        class QualifierValue(_message.Message):
            __slots__ = ("qualifier", "value", "timestamp", "delete_type")
            QUALIFIER_FIELD_NUMBER: _ClassVar[int]
            VALUE_FIELD_NUMBER: _ClassVar[int]
            TIMESTAMP_FIELD_NUMBER: _ClassVar[int]
            DELETE_TYPE_FIELD_NUMBER: _ClassVar[int]
            qualifier: bytes
            value: bytes
            timestamp: int
            delete_type: MutationProto.DeleteType
            def __init__(self, qualifier: _Optional[bytes] = ..., value: _Optional[bytes] = ..., timestamp: _Optional[int] = ..., delete_type: _Optional[_Union[MutationProto.DeleteType, str]] = ...) -> None: ...
        FAMILY_FIELD_NUMBER: _ClassVar[int]
        QUALIFIER_VALUE_FIELD_NUMBER: _ClassVar[int]
        family: bytes
        qualifier_value: _containers.RepeatedCompositeFieldContainer[MutationProto.ColumnValue.QualifierValue]
        def __init__(self, family: _Optional[bytes] = ..., qualifier_value: _Optional[_Iterable[_Union[MutationProto.ColumnValue.QualifierValue, _Mapping]]] = ...) -> None: ...
    ROW_FIELD_NUMBER: _ClassVar[int]
    MUTATE_TYPE_FIELD_NUMBER: _ClassVar[int]
    COLUMN_VALUE_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMP_FIELD_NUMBER: _ClassVar[int]
    row: bytes
    mutate_type: MutationProto.MutationType
    column_value: _containers.RepeatedCompositeFieldContainer[MutationProto.ColumnValue]
    timestamp: int
    def __init__(self, row: _Optional[bytes] = ..., mutate_type: _Optional[_Union[MutationProto.MutationType, str]] = ..., column_value: _Optional[_Iterable[_Union[MutationProto.ColumnValue, _Mapping]]] = ..., timestamp: _Optional[int] = ...) -> None: ...

class MutateRequest(_message.Message):
    __slots__ = ("region", "mutation", "condition")
    REGION_FIELD_NUMBER: _ClassVar[int]
    MUTATION_FIELD_NUMBER: _ClassVar[int]
    CONDITION_FIELD_NUMBER: _ClassVar[int]
    region: RegionSpecifier
    mutation: MutationProto
    condition: Condition
    def __init__(self, region: _Optional[_Union[RegionSpecifier, _Mapping]] = ..., mutation: _Optional[_Union[MutationProto, _Mapping]] = ..., condition: _Optional[_Union[Condition, _Mapping]] = ...) -> None: ...

class MutateResponse(_message.Message):
    __slots__ = ("result", "processed")
    RESULT_FIELD_NUMBER: _ClassVar[int]
    PROCESSED_FIELD_NUMBER: _ClassVar[int]
    result: Result
    processed: bool
    def __init__(self, result: _Optional[_Union[Result, _Mapping]] = ..., processed: _Optional[bool] = ...) -> None: ...

class Action(_message.Message):
    __slots__ = ("index", "mutation", "get")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    MUTATION_FIELD_NUMBER: _ClassVar[int]
    GET_FIELD_NUMBER: _ClassVar[int]
    index: int
    mutation: MutationProto
    get: Get
    def __init__(self, index: _Optional[int] = ..., mutation: _Optional[_Union[MutationProto, _Mapping]] = ..., get: _Optional[_Union[Get, _Mapping]] = ...) -> None: ...

class RegionAction(_message.Message):
    __slots__ = ("region", "action", "condition")
    REGION_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    CONDITION_FIELD_NUMBER: _ClassVar[int]
    region: RegionSpecifier
    action: _containers.RepeatedCompositeFieldContainer[Action]
    condition: Condition
    def __init__(self, region: _Optional[_Union[RegionSpecifier, _Mapping]] = ..., action: _Optional[_Iterable[_Union[Action, _Mapping]]] = ..., condition: _Optional[_Union[Condition, _Mapping]] = ...) -> None: ...

class ResultOrException(_message.Message):
    __slots__ = ("index", "result", "exception")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    EXCEPTION_FIELD_NUMBER: _ClassVar[int]
    index: int
    result: Result
    exception: NameBytesPair
    def __init__(self, index: _Optional[int] = ..., result: _Optional[_Union[Result, _Mapping]] = ..., exception: _Optional[_Union[NameBytesPair, _Mapping]] = ...) -> None: ...

class RegionActionResult(_message.Message):
    __slots__ = ("resultOrException", "exception", "processed")
    RESULTOREXCEPTION_FIELD_NUMBER: _ClassVar[int]
    EXCEPTION_FIELD_NUMBER: _ClassVar[int]
    PROCESSED_FIELD_NUMBER: _ClassVar[int]
    resultOrException: _containers.RepeatedCompositeFieldContainer[ResultOrException]
    exception: NameBytesPair
    processed: bool
    def __init__(self, resultOrException: _Optional[_Iterable[_Union[ResultOrException, _Mapping]]] = ..., exception: _Optional[_Union[NameBytesPair, _Mapping]] = ..., processed: _Optional[bool] = ...) -> None: ...

class MultiRequest(_message.Message):
    __slots__ = ("regionAction",)
    REGIONACTION_FIELD_NUMBER: _ClassVar[int]
    regionAction: _containers.RepeatedCompositeFieldContainer[RegionAction]
    def __init__(self, regionAction: _Optional[_Iterable[_Union[RegionAction, _Mapping]]] = ...) -> None: ...

class MultiResponse(_message.Message):
    __slots__ = ("regionActionResult",)
    REGIONACTIONRESULT_FIELD_NUMBER: _ClassVar[int]
    regionActionResult: _containers.RepeatedCompositeFieldContainer[RegionActionResult]
    def __init__(self, regionActionResult: _Optional[_Iterable[_Union[RegionActionResult, _Mapping]]] = ...) -> None: ...

class Scan(_message.Message):
    __slots__ = ("column", "attribute", "start_row", "stop_row", "max_versions", "caching", "include_stop_row")
    COLUMN_FIELD_NUMBER: _ClassVar[int]
    ATTRIBUTE_FIELD_NUMBER: _ClassVar[int]
    START_ROW_FIELD_NUMBER: _ClassVar[int]
    STOP_ROW_FIELD_NUMBER: _ClassVar[int]
    MAX_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    CACHING_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_ROW_FIELD_NUMBER: _ClassVar[int]
    column: _containers.RepeatedCompositeFieldContainer[Column]
    attribute: _containers.RepeatedCompositeFieldContainer[NameBytesPair]
    start_row: bytes
    stop_row: bytes
    max_versions: int
    caching: int
    include_stop_row: bool
    def __init__(self, column: _Optional[_Iterable[_Union[Column, _Mapping]]] = ..., attribute: _Optional[_Iterable[_Union[NameBytesPair, _Mapping]]] = ..., start_row: _Optional[bytes] = ..., stop_row: _Optional[bytes] = ..., max_versions: _Optional[int] = ..., caching: _Optional[int] = ..., include_stop_row: _Optional[bool] = ...) -> None: ...

class ScanRequest(_message.Message):
    __slots__ = ("region", "scan", "number_of_rows", "close_scanner")
    REGION_FIELD_NUMBER: _ClassVar[int]
    SCAN_FIELD_NUMBER: _ClassVar[int]
    NUMBER_OF_ROWS_FIELD_NUMBER: _ClassVar[int]
    CLOSE_SCANNER_FIELD_NUMBER: _ClassVar[int]
    region: RegionSpecifier
    scan: Scan
    number_of_rows: int
    close_scanner: bool
    def __init__(self, region: _Optional[_Union[RegionSpecifier, _Mapping]] = ..., scan: _Optional[_Union[Scan, _Mapping]] = ..., number_of_rows: _Optional[int] = ..., close_scanner: _Optional[bool] = ...) -> None: ...

class ScanResponse(_message.Message):
    __slots__ = ("results", "more_results_in_region")
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    MORE_RESULTS_IN_REGION_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[Result]
    more_results_in_region: bool
    def __init__(self, results: _Optional[_Iterable[_Union[Result, _Mapping]]] = ..., more_results_in_region: _Optional[bool] = ...) -> None: ...

class CreateTableRequest(_message.Message):
    __slots__ = ("table_schema", "split_keys")
    TABLE_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    SPLIT_KEYS_FIELD_NUMBER: _ClassVar[int]
    table_schema: TableSchema
    split_keys: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, table_schema: _Optional[_Union[TableSchema, _Mapping]] = ..., split_keys: _Optional[_Iterable[bytes]] = ...) -> None: ...

class TableRequest(_message.Message):
    __slots__ = ("table_name",)
    TABLE_NAME_FIELD_NUMBER: _ClassVar[int]
    table_name: TableName
    def __init__(self, table_name: _Optional[_Union[TableName, _Mapping]] = ...) -> None: ...

class ProcedureResponse(_message.Message):
    __slots__ = ("proc_id",)
    PROC_ID_FIELD_NUMBER: _ClassVar[int]
    proc_id: int
    def __init__(self, proc_id: _Optional[int] = ...) -> None: ...

class GetProcedureResultRequest(_message.Message):
    __slots__ = ("proc_id",)
    PROC_ID_FIELD_NUMBER: _ClassVar[int]
    proc_id: int
    def __init__(self, proc_id: _Optional[int] = ...) -> None: ...

class GenericExceptionMessage(_message.Message):
    __slots__ = ("class_name", "message")
    CLASS_NAME_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    class_name: str
    message: str
    def __init__(self, class_name: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class ForeignExceptionMessage(_message.Message):
    __slots__ = ("generic_exception",)
    GENERIC_EXCEPTION_FIELD_NUMBER: _ClassVar[int]
    generic_exception: GenericExceptionMessage
    def __init__(self, generic_exception: _Optional[_Union[GenericExceptionMessage, _Mapping]] = ...) -> None: ...

class GetProcedureResultResponse(_message.Message):
    __slots__ = ("state", "exception")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        NOT_FOUND: _ClassVar[GetProcedureResultResponse.State]
        RUNNING: _ClassVar[GetProcedureResultResponse.State]
        FINISHED: _ClassVar[GetProcedureResultResponse.State]
    NOT_FOUND: GetProcedureResultResponse.State
    RUNNING: GetProcedureResultResponse.State
    FINISHED: GetProcedureResultResponse.State
    STATE_FIELD_NUMBER: _ClassVar[int]
    EXCEPTION_FIELD_NUMBER: _ClassVar[int]
    state: GetProcedureResultResponse.State
    exception: ForeignExceptionMessage
    def __init__(self, state: _Optional[_Union[GetProcedureResultResponse.State, str]] = ..., exception: _Optional[_Union[ForeignExceptionMessage, _Mapping]] = ...) -> None: ...
